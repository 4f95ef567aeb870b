"""`test --config traces.yaml`: bins, modes, what is written, and that each number is what it says."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path

import pytest

from callbacks.run_record import read_metrics
from datamodules.dialogue_bins import BINS, DialogueBins, choose_until, held_out
from datamodules.mumu import load_dialogues
from inference.generator import Generated
from inference.traces import parse
from lightning_modules import plots
from lightning_modules.report import measured_groups, metric_name
from lightning_modules.trace_test import TraceTest, baseline_plans, measure, prediction_rows
from tests.cli_tools import fails
from tests.tiny_training import run_forked, tiny


def arguments(name: str, **options: object) -> list[str]:
    given = {
        "model.init_from": tiny().base, "data.path": tiny().world, "data.turns_per_bin": 6, "name": name,
        "model.max_new_tokens": 24, "model.timing_dialogues": 1, "trainer.accelerator": "cpu", **options,
    }  # fmt: skip
    return ["test", "--config", "traces.yaml", *(f"--{key}={value}" for key, value in given.items())]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("test-run")
    assert run_forked(arguments("t"), folder) == 0
    return folder / "runs" / "t"


def rows(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "predictions.jsonl").read_text().splitlines()]


def test_every_turn_is_written_in_every_mode(run):
    found = rows(run)
    turns = {mode: {(r["dialogue"], r["turn"]) for r in found if r["mode"] == mode}
             for mode in ("carried", "reset", "raw", "baseline")}  # fmt: skip
    assert turns["carried"] == turns["reset"] == turns["raw"] == turns["baseline"]
    assert len(found) == 4 * len(turns["carried"])
    assert all(r["valid"] and r["plan"] for r in found if r["mode"] != "raw")  # the automaton's promise
    assert all((r["plan"] is None) == (not r["valid"]) and bool(r["error"]) != r["valid"] for r in found)


def test_metrics_count_the_turns_of_each_group(run):
    metrics, found = read_metrics(run), [r for r in rows(run) if r["mode"] == "carried"]
    assert metrics["plan_exact_match"]["n"] == len(found)
    assert metrics["plan_valid"]["value"] == 1.0 and metrics["raw/plan_valid"]["n"] == len(found)
    for key, value in Counter(r["bin"] for r in found).items():
        assert key in BINS and metrics[f"plan_exact_match/{key}"]["n"] == value
    for key, value in Counter(f"hops-{r['hops']}" for r in found).items():
        assert metrics[f"baseline/hop_count_accuracy/{key}"]["n"] == value
        assert metrics[f"baseline/hop_count_accuracy/{key}"]["value"] == float(key == "hops-1")
    cross = sum(r["cross_turn"] for r in found)
    assert metrics["reset/dependency_f1/cross-turn"]["n"] == cross > 0
    assert ("carried", "") in measured_groups(metrics) and ("reset", "cross-turn") in measured_groups(metrics)


def test_pictures_and_times(run, tmp_path, capsys):
    for name in ("plans_by_length.png", "seconds_per_turn.png"):
        assert (run / name).read_bytes().startswith(b"\x89PNG")
    times = [json.loads(line) for line in (run / "timings.jsonl").read_text().splitlines()]
    longest = max(Counter(r["dialogue"] for r in rows(run) if r["mode"] == "raw").values())
    assert [row["turn"] for row in times] == list(range(1, longest + 1))
    assert all(row["seconds"] > 0 and row["tokens"] > 0 for row in times)
    out = tmp_path / "both.png"
    assert plots.main([str(run), str(run), "--out", str(out)]) == 0 and out.exists()
    assert plots.main([str(tmp_path), "--out", str(out)]) == 2
    assert "timings.jsonl does not exist" in capsys.readouterr().err
    (tmp_path / "timings.jsonl").write_text('{"turn": 1, "seconds": 0.5}\n{"turn": 2}\n')
    assert plots.main([str(tmp_path), "--out", str(out)]) == 2
    assert "timings.jsonl:2: not a row of timings" in capsys.readouterr().err


def test_gold_plans_score_everything_and_wrong_ones_do_not():
    dialogue = held_out(load_dialogues(tiny().world / "short" / "dev.jsonl")[0], "short-3-7")
    gold = [Generated(turn.plan, (), True) for turn in dialogue.turns]
    metrics = measure(prediction_rows(dialogue, "carried", gold))
    assert all(value["value"] == 1.0 for value in metrics.values())
    wrong = [Generated(None, (), False, "no [/PLAN]"), *gold[1:]]
    metrics = measure(prediction_rows(dialogue, "raw", wrong))
    share = 1 - 1 / len(gold)
    assert metrics["raw/plan_valid"]["value"] == metrics["raw/plan_exact_match"]["value"]
    assert metrics["raw/plan_valid"]["value"] == pytest.approx(share)
    baseline = measure(prediction_rows(dialogue, "baseline", baseline_plans(dialogue)))
    assert (
        baseline["baseline/plan_exact_match"]["value"] < 1 and baseline["baseline/plan_valid"]["value"] == 1
    )


def test_rows_of_a_dialogue_name_its_cross_turn_turns():
    for built in load_dialogues(tiny().world / "long" / "dev.jsonl"):
        dialogue = held_out(built, "long-6-15")
        assert sum(dialogue.hops) == len(built.traces)
        for turn, cross in zip(built.turns, dialogue.cross, strict=True):
            first = turn.traces[0].id
            assert cross == any(dep < first for trace in turn.traces for dep in trace.deps)
        row = prediction_rows(dialogue, "baseline", baseline_plans(dialogue))[0]
        assert parse(row["gold"]) == dialogue.turns[0].plan


def test_reset_starts_every_turn_from_nothing(monkeypatch):
    """A policy that tells how much it has read: with the state carried it grows, with a reset it is one turn's."""
    module = TraceTest(init_from=str(tiny().base), modes=["reset"], max_new_tokens=24)
    module.configure_model()
    dialogue = held_out(load_dialogues(tiny().world / "short" / "dev.jsonl")[0], "short-3-7")
    fed: list[tuple[float, list[int]]] = []
    feed = type(module.generator.policy).feed

    def watch(self, states, token_ids):
        fed.append((float(states.ssm_ESHPN.abs().sum()), token_ids[0]))
        return feed(self, states, token_ids)

    monkeypatch.setattr(type(module.generator.policy), "feed", watch)
    written = module._reset_plans([dialogue])[0]
    starts = [state for state, ids in fed if ids[0] == module.tokens.bos_id]
    assert starts == [0.0] * len(dialogue.turns)
    ids = [trace.id for plan in written for trace in plan.plan.traces]  # type: ignore[union-attr]
    assert ids == list(range(1, len(ids) + 1))


def test_bins_take_what_is_asked_for():
    dialogues = load_dialogues(tiny().world / "short" / "train.jsonl")
    for turns in (1, 10, 50, 10**6):
        chosen = choose_until(dialogues, turns)
        found = sum(len(d.turns) for d in chosen)
        assert found >= min(turns, sum(len(d.turns) for d in dialogues))
        assert len(chosen) <= turns and len({d.id for d in chosen}) == len(chosen)
    data = DialogueBins(str(tiny().world), part="train")
    data.setup()
    for dialogue in data.dialogues:
        split, low, high = BINS[dialogue.bin]
        assert dialogue.id.startswith(split) and low <= len(dialogue.turns) <= high


def test_mistakes_are_one_line(in_tmp, capsys, tmp_path):
    assert "model.modes names 'magic'" in fails(capsys, *arguments("a", **{"model.modes": "[magic]"}))
    assert "is not a directory" in fails(capsys, *arguments("a", **{"data.path": "nowhere"}))
    assert "does not exist" in fails(capsys, *arguments("a", **{"model.init_from": "nowhere"}))
    shutil.copytree(tiny().world / "stage1", tmp_path / "singles" / "stage1")
    line = fails(capsys, *arguments("a", **{"data.path": tmp_path / "singles"}))
    assert "holds no multi-turn dialogues" in line


def test_names_of_metrics():
    assert metric_name("carried", "plan_valid", "") == "plan_valid"
    assert metric_name("raw", "plan_valid", "hops-2") == "raw/plan_valid/hops-2"
