"""The synthesiser as a whole: invariants over random sources, the directory it writes, its command line, its reader."""

from __future__ import annotations

import copy
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from datamodules import mumu
from inference.traces import TraceDraft, TracePlan, linearise, parse, references
from tests.mumu_invariants import OracleReader, check_directory, mentions_answer, rows, source_text, traces
from tests.mumu_sources import records, write

Sources = dict[str, dict[str, dict[str, Any]]]


def built(
    folder: Path, seed: int, train: int, dev: int, entities: int = 4, **options: Any
) -> tuple[Path, Sources, dict[str, Any]]:
    """A directory built from random records of two worlds."""
    items = {"train": records(seed, train, "A", entities), "dev": records(seed, dev, "B", entities)}
    paths = {split: write(folder / f"{split}.jsonl", part) for split, part in items.items()}
    manifest = mumu.build([paths["train"]], [paths["dev"]], folder / "out", seed=seed, **options)
    return folder / "out", {s: {r["id"]: r for r in part} for s, part in items.items()}, manifest


@pytest.fixture(scope="module")
def standard(tmp_path_factory) -> tuple[Path, Sources, dict[str, Any]]:
    """One directory with every kind of file, used by many tests."""
    folder = tmp_path_factory.mktemp("mumu")
    return built(folder, 7, 300, 300, entities=25, short=40, long=15, short_dev=25, long_dev=8, ultra=3)


@given(st.integers(0, 10**6), st.integers(1, 90), st.integers(1, 30), st.booleans())
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_invariants_hold_on_random_sources(seed, train, dev, mentions):
    with tempfile.TemporaryDirectory() as folder:
        root, sources, manifest = built(Path(folder), seed, train, dev, mention_splice=mentions)
        check_directory(root, sources)
        assert set(manifest["statistics"]) == {
            f"{path.parent.name}/{path.stem}" for path in root.glob("*/*.jsonl")
        }


def test_mention_splices_are_an_option(tmp_path, standard):
    root, sources, manifest = built(tmp_path, 1, 120, 40, mention_splice=True)
    check_directory(root, sources)
    assert manifest["mention_splices"]["short/train"] > 0 and "mention_splices" not in standard[2]
    found = [
        trace
        for dialogue in rows(root / "short" / "train.jsonl")
        for trace in traces(dialogue)
        if mentions_answer(trace, source_text(sources["train"], trace))
    ]
    assert len(found) == manifest["mention_splices"]["short/train"]


def test_every_stage_is_filled_and_linked(standard):
    root, sources, manifest = standard
    operators = check_directory(root, sources)
    assert all(operators[op] > 10 for op in ("ORIG", "GS_A", "GS_C", "SQR_B", "SQR_C"))
    assert {str(p.relative_to(root)) for p in root.rglob("*") if p.is_file()} == {
        "stage1/train.jsonl", "stage1/dev.jsonl", "short/train.jsonl", "short/dev.jsonl", "long/train.jsonl",
        "long/dev.jsonl", "ultra/dev.jsonl", "corpus.jsonl", "sample.html", "manifest.json",
    }  # fmt: skip
    assert list(manifest["absent"]) == ["ultra/train"] and "not built" in manifest["absent"]["ultra/train"]


def test_the_oracle_reader_answers_everything_and_needs_the_right_dependencies(standard):
    """I15: resolved by the gold dependencies, every turn is answered; with dependencies drawn at random, fewer are."""
    root, sources, _ = standard
    for split in ("train", "dev"):
        oracle = OracleReader(sources[split])
        dialogues = rows(root / "short" / f"{split}.jsonl") + rows(root / "long" / f"{split}.jsonl")
        assert all(oracle.exact_match(dialogue) == 1.0 for dialogue in dialogues)
        rng = random.Random(3)
        shuffled = [
            oracle.exact_match(
                d, {t["id"]: [rng.randrange(1, t["id"]) for _ in t["deps"]] for t in traces(d) if t["deps"]}
            )
            for d in dialogues
        ]
        assert sum(shuffled) / len(shuffled) < 0.7


def test_plans_survive_linearisation(standard):
    """I16: every turn's gold plan is the plan that comes back from its text; references equal dependencies."""
    root, _, _ = standard
    for path in sorted(root.glob("*/*.jsonl")):
        for dialogue in mumu.load_dialogues(path):
            for turn in dialogue.turns:
                drafts = tuple(TraceDraft(t.id, t.sub_question, t.keywords, t.deps) for t in turn.traces)
                plan = TracePlan(drafts)
                assert parse(linearise(plan)) == plan
                assert all(sorted(set(references(t.sub_question))) == list(t.deps) for t in turn.traces)


def test_corpus_is_the_union_of_all_contexts(standard):
    root, sources, manifest = standard
    used = {split: {d["id"]: d for d in rows(root / "stage1" / f"{split}.jsonl")} for split in sources}
    gids = {t["source"][0] for part in used.values() for d in part.values() for t in traces(d)}
    want = {
        (p["title"], p["paragraph_text"])
        for part in sources.values()
        for gid, record in part.items()
        if gid in gids
        for p in record["paragraphs"]
    }
    corpus = rows(root / "corpus.jsonl")
    assert {(row["title"], row["text"]) for row in corpus} == want and len(corpus) == len(want)
    assert all(set(row) == {"id", "title", "text"} for row in corpus) and manifest["counts"][
        "paragraphs"
    ] == len(want)


def test_manifest_counts_what_is_there(standard):
    root, sources, manifest = standard
    stored = json.loads((root / "manifest.json").read_text())
    assert stored == manifest and manifest["seed"] == 7 and manifest["realiser"] == "template"
    for name, row in manifest["statistics"].items():
        dialogues = mumu.load_dialogues(root / f"{name}.jsonl")
        turns = [len(d.turns) for d in dialogues]
        assert row["dialogues"] == len(dialogues) and row["total_turns"] == sum(turns)
        assert row["turns"] == {
            "min": min(turns),
            "max": max(turns),
            "mean": round(sum(turns) / len(turns), 2),
        }
        assert row["cross_turn_edges"]["max"] == max(d.cross_turn_edges() for d in dialogues)
    for split in ("train", "dev"):
        count = manifest["counts"]["source_questions"][split]
        lost = manifest["rejections"][f"duplicates/{split}"]
        assert count["accepted"] == len(sources[split]) == count["distinct"] + sum(lost.values())
        (file,) = manifest["sources"][split]
        assert file["file"] == f"{split}.jsonl" and len(file["sha256"]) == 64
    assert manifest["rejections"]["short/train"]["gs/ambiguous_phrase"] > 0


def test_same_inputs_give_the_same_bytes_in_any_process(tmp_path, standard):
    """I14, with hash randomisation on: sets and dicts of strings must not leak their order."""
    for split in ("train", "dev"):
        write(tmp_path / f"{split}.jsonl", records(5, 60, split))
    outputs = []
    for hash_seed in ("1", "2"):
        out = tmp_path / f"out{hash_seed}"
        command = [
            "-m",
            "datamodules.mumu",
            "--train",
            "train.jsonl",
            "--dev",
            "dev.jsonl",
            "--out",
            str(out),
        ]
        environment = {
            **os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(Path(mumu.__file__).parents[1])
        }  # fmt: skip
        run = subprocess.run(
            [sys.executable, *command], cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert run.returncode == 0, run.stderr
        assert "short/train" in run.stdout and f"written to {out}" in run.stdout
        outputs.append({p.relative_to(out): p.read_bytes() for p in out.rglob("*") if p.is_file()})
    assert outputs[0] == outputs[1]


def test_another_seed_gives_other_dialogues(tmp_path):
    for seed in (1, 2):
        (tmp_path / str(seed)).mkdir()
        items = write(tmp_path / str(seed) / "train.jsonl", records(5, 60, "A"))
        mumu.build([items], [], tmp_path / str(seed) / "out", seed=seed)
    one, two = (rows(tmp_path / str(seed) / "out" / "short" / "train.jsonl") for seed in (1, 2))
    assert [d["turns"] for d in one] != [d["turns"] for d in two]


def test_train_gives_way_to_dev(tmp_path):
    """The same source on both sides leaves nothing to train on, and says so."""
    path = write(tmp_path / "both.jsonl", records(5, 30, "A"))
    with pytest.raises(ValueError, match=r"no usable question left in .*both\.jsonl.*sub_question"):
        mumu.build([path], [path], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_paths_without_paragraphs(tmp_path):
    items = records(5, 40, "A")
    for item in items:
        for step in item["question_decomposition"]:
            step["title"] = item["paragraphs"][step.pop("paragraph_support_idx")]["title"]
        del item["paragraphs"]
    path = write(tmp_path / "plans.jsonl", items)
    with pytest.raises(ValueError, match="allow-without-paragraphs"):
        mumu.build([path], [], tmp_path / "out")
    mumu.build([path], [], tmp_path / "out", allow_without_paragraphs=True)
    check_directory(tmp_path / "out", {"train": {r["id"]: r for r in items}, "dev": {}})
    assert (tmp_path / "out" / "corpus.jsonl").read_text() == ""


def test_sizes_and_uses_are_respected(tmp_path):
    root, sources, manifest = built(tmp_path, 3, 80, 20, short=5, long=0, short_dev=500, max_uses=2)
    assert manifest["statistics"]["short/train"]["dialogues"] == 5
    assert "long/train" not in manifest["statistics"] and not (root / "long" / "train.jsonl").exists()
    assert manifest["absent"]["long/train"] == "not asked for"
    assert "of 500: the source holds no more" in manifest["absent"]["short/dev"]
    check_directory(root, sources, max_uses=2)


def test_a_tuning_split_shares_no_evidence_with_training(tmp_path):
    items = [record for world in range(12) for record in records(world, 12, f"W{chr(97 + world)}x")]
    path = write(tmp_path / "train.jsonl", items)
    manifest = mumu.build([path], [], tmp_path / "out", tune=0.3)
    used = manifest["counts"]["source_questions"]
    assert used["train"]["used"] > used["tune"]["used"] > 0
    assert used["tune"]["used"] <= 0.3 * (used["train"]["used"] + used["tune"]["used"])
    sources = {r["id"]: r for r in items}
    check_directory(tmp_path / "out", {"train": sources, "tune": sources, "dev": {}})
    assert all(d["split"] == "tune" for d in rows(tmp_path / "out/stage1/tune.jsonl"))
    without = mumu.build([path], [], tmp_path / "all")
    assert (
        "tune" not in without["counts"]["source_questions"]
        and not (tmp_path / "all/stage1/tune.jsonl").exists()
    )
    with pytest.raises(ValueError, match=r"tune is 1\.5"):
        mumu.build([path], [], tmp_path / "none", tune=1.5)


def test_six_thousand_questions_take_seconds(tmp_path):
    path = write(tmp_path / "train.jsonl", records(2, 6000, "A", entities=150))
    start = time.perf_counter()
    manifest = mumu.build([path], [], tmp_path / "out")
    assert manifest["counts"]["source_questions"]["train"]["used"] > 4000
    assert time.perf_counter() - start < 60


class TestDirectory:
    """What happens to a directory that is in use, and to an interrupted build."""

    @pytest.fixture
    def source(self, tmp_path) -> Path:
        return write(tmp_path / "train.jsonl", records(5, 20, "A"))

    def test_in_use(self, tmp_path, source):
        out = tmp_path / "out"
        mumu.build([source], [], out)
        before = (out / "manifest.json").read_bytes()
        with pytest.raises(FileExistsError, match="pass --overwrite"):
            mumu.build([source], [], out, seed=1)
        assert (out / "manifest.json").read_bytes() == before
        mumu.build([source], [], out, seed=1, overwrite=True)
        assert json.loads((out / "manifest.json").read_text())["seed"] == 1

    def test_somebody_elses(self, tmp_path, source):
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "thesis.tex").write_text("mine")
        for overwrite in (False, True):
            with pytest.raises(FileExistsError, match=r"holds something else \(thesis\.tex\)"):
                mumu.build([source], [], tmp_path / "out", overwrite=overwrite)
        (tmp_path / "file").write_text("")
        with pytest.raises(FileExistsError, match="is a file"):
            mumu.build([source], [], tmp_path / "file")

    def test_a_source_folder_is_left_alone(self, tmp_path, source):
        (tmp_path / "out" / "source").mkdir(parents=True)
        (tmp_path / "out" / "source" / "train.jsonl").write_bytes(source.read_bytes())
        mumu.build([source], [], tmp_path / "out")
        assert (tmp_path / "out" / "source" / "train.jsonl").read_bytes() == source.read_bytes()
        assert (tmp_path / "out" / "manifest.json").is_file()

    def test_an_interrupted_build_leaves_nothing(self, tmp_path, source, monkeypatch):
        def fail(record: dict[str, Any]) -> str:
            raise OSError("disk full")

        monkeypatch.setattr(mumu, "dump_line", fail)
        with pytest.raises(OSError, match="disk full"):
            mumu.build([source], [], tmp_path / "out")
        assert [p.name for p in tmp_path.iterdir()] == ["train.jsonl"]


def test_command_line_errors_are_one_clear_line(tmp_path, capsys):
    source = write(tmp_path / "train.jsonl", records(5, 20, "A"))
    cases = [
        (["--train", str(tmp_path / "no.jsonl")], "no.jsonl: no such file"),
        (
            ["--train", str(source), "--realiser", "llm"],
            "realiser 'llm' needs a server: name it with --llm-url",
        ),
        (["--train", str(source), "--llm-url", "http://x"], "the --llm options belong to --realiser llm"),
        (
            ["--train", str(source), "--realiser", "llm", "--llm-url", "x"],
            "the LLM URL must look like http://",
        ),
        (["--train", str(source), "--realiser", "poet"], "unknown realiser 'poet'; use 'template' or 'llm'"),
        (["--train", str(source), "--short", "-1"], "sizes must be 0 or more"),
        ([], "no source given"),
    ]
    for arguments, message in cases:
        assert mumu.main([*arguments, "--out", str(tmp_path / "out")]) == 2
        error = capsys.readouterr().err
        assert message in " ".join(error.split()) and "Traceback" not in error
    assert not (tmp_path / "out").exists()


class TestReader:
    """`load_dialogues` accepts what was written and names file, line and field of what is wrong."""

    @pytest.fixture
    def dialogue(self, standard) -> dict[str, Any]:
        dialogues = rows(standard[0] / "short" / "train.jsonl")
        return copy.deepcopy(next(d for d in dialogues if len(d["turns"][0]["traces"]) > 1))

    def test_round_trip(self, standard):
        path = standard[0] / "long" / "dev.jsonl"
        loaded = mumu.load_dialogues(path)
        from datamodules.mumu_model import dump_line, to_row

        assert "".join(dump_line(to_row(d)) for d in loaded) == path.read_text(encoding="utf-8")
        assert loaded[0].stage == 3 and loaded[0].split == "dev"

    @pytest.mark.parametrize(
        ("path", "value", "message"),
        [
            ("schema", "mumu-dialogue/99", "'schema' is 'mumu-dialogue/99'"),
            ("schema", ..., "'schema' is missing"),
            ("turns", [], "'turns' is empty"),
            ("seed", "42", "'seed' must be int"),
            ("turns.1", 3, "'turns[1]' must be dict"),
            ("turns.1.t", 5, "'turns[1].t' must be 2, got 5"),
            ("turns.0.question", "  ", "'turns[0].question' is empty"),
            ("turns.0.operator", "MAGIC", "'turns[0].operator' must be one of"),
            ("turns.0.traces", [], "'turns[0].traces' is empty"),
            ("turns.0.traces.1.id", 1, "'turns[0].traces[1].id' must be 2"),
            ("turns.0.traces.0.sub_question", "", "'turns[0].traces[0].sub_question' is empty"),
            ("turns.0.traces.0.deps", [1], "'turns[0].traces[0].deps' must name distinct earlier traces"),
            ("turns.0.traces.0.deps", ["1"], "'turns[0].traces[0].deps[0]' must be int, got str"),
            ("turns.0.traces.0.sub_question", "who is [A9]", "the sub-question refers to [A9]"),
            (
                "turns.0.traces.0.sub_question",
                f"who is [A{'9' * 5000}]",
                "the sub-question refers to [A999999999]",
            ),
            ("turns.0.traces.0.source", ["x"], "'turns[0].traces[0].source' must be [graph id, node number]"),
            ("turns.0.traces.0.keywords", ..., "'turns[0].traces[0].keywords' is missing"),
            ("turns.0.ambiguous", 0, "'turns[0].ambiguous' must be bool"),
        ],
    )
    def test_errors(self, tmp_path, dialogue, path, value, message):
        bad = copy.deepcopy(dialogue)
        *way, last = [int(p) if p.isdigit() else p for p in path.split(".")]
        target: Any = bad
        for step in way:
            target = target[step]
        if value is ...:
            del target[last]
        else:
            target[last] = value
        with pytest.raises(ValueError) as error:
            mumu.load_dialogues(write(tmp_path / "bad.jsonl", [dialogue, bad]))
        assert "bad.jsonl, line 2" in str(error.value) and message in str(error.value)

    def test_empty_and_missing(self, tmp_path):
        (tmp_path / "empty.jsonl").write_text("\n")
        with pytest.raises(ValueError, match="holds no dialogue"):
            mumu.load_dialogues(tmp_path / "empty.jsonl")
        with pytest.raises(FileNotFoundError, match=r"none\.jsonl: no such file"):
            mumu.load_dialogues(tmp_path / "none.jsonl")


@pytest.mark.shared
def test_real_musique(tmp_path, shared_data):
    """Every invariant on dialogues from real questions, plan-only records included."""
    folder = shared_data / "musique"
    files = {s: [folder / f"{s}.jsonl", folder / f"{s}_decompositions.jsonl"] for s in ("train", "dev")}
    manifest = mumu.build(files["train"], files["dev"], tmp_path / "out", allow_without_paragraphs=True)
    sources = {
        split: {r["id"]: r for path in paths for r in map(json.loads, path.read_text().splitlines())}
        for split, paths in files.items()
    }
    check_directory(tmp_path / "out", sources)
    for split in ("train", "dev"):
        oracle = OracleReader(sources[split])
        dialogues = rows(tmp_path / "out" / "short" / f"{split}.jsonl")
        assert all(oracle.exact_match(d) == 1.0 for d in dialogues)
    for name in ("short/train", "long/train", "short/dev", "long/dev", "ultra/dev"):
        assert manifest["statistics"][name]["dialogues"] >= 0.8 * manifest["wanted"][name]
    assert manifest["statistics"]["long/train"]["gs_share"] > 0.4
