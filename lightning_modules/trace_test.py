"""Tests a trace generator on whole dialogues, free-running: every turn continues from the plans it wrote itself.

In:  a run, export, model directory or the shipped generator; dialogues in bins of length (datamodules.dialogue_bins).
Out: metrics.json (plain names for `carried`, `MODE/…` for the others, `…/GROUP` for bins, hops, operators, cross-turn
     turns), predictions.jsonl, timings.jsonl and two plots. CMT-RAG Tables 2 and 3, section 4.5.

Modes:
* `carried`: the recurrent state lives from the first turn to the last; the automaton keeps plans valid;
* `reset`: every turn starts from an empty state (the numbering of traces goes on), which shows what the state carries;
* `raw`: as `carried` without the automaton: `plan_valid` is the policy's own;
* `baseline`: no model; the whole question becomes one trace without dependencies.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.loggers import TensorBoardLogger

from callbacks.run_record import read_metrics, write_metrics
from datamodules.dialogue_bins import HeldOutDialogue
from datamodules.mumu_text import keywords
from inference.exports import load_merged, load_tokens
from inference.generator import Generated, TraceGenerator
from inference.metrics import aggregate_plan_metrics
from inference.model import extend_vocabulary, make_policy
from inference.traces import TraceDraft, TracePlan, linearise
from lightning_modules.metrics import gather, plan_pairs, write_plans
from lightning_modules.plots import bins_figure, timings_figure
from lightning_modules.report import metric_name, print_bins
from lightning_modules.runs import resolve_start

MODES = ("carried", "reset", "raw", "baseline")


class TraceTest(LightningModule):
    """Writes plans of test dialogues and measures them.

    Args:
        predecessor: the run that is tested where `init_from` is null, else the asset shipped for it.
        init_from: a run, export or model directory.
        allow_assets: whether the shipped asset may stand in for a run that is missing.
        modes: which of carried, reset, raw, baseline to measure.
        max_new_tokens: of one plan.
        timing_dialogues: how many of the longest dialogues are written once more, alone and with a clock.
    """

    def __init__(
        self,
        predecessor: str | None = "stage3",
        init_from: str | None = None,
        allow_assets: bool = True,
        modes: Sequence[str] = MODES,
        max_new_tokens: int = 384,
        timing_dialogues: int = 2,
    ) -> None:
        super().__init__()
        if unknown := [mode for mode in modes if mode not in MODES]:
            raise ValueError(f"model.modes names {unknown[0]!r}: it knows {', '.join(MODES)}")
        if not modes:
            raise ValueError("model.modes is empty: name at least one of " + ", ".join(MODES))
        if max_new_tokens < 1 or timing_dialogues < 0:
            raise ValueError("model.max_new_tokens must be 1 or more and model.timing_dialogues 0 or more")
        self.start = resolve_start(init_from, predecessor, "none", allow_assets)
        self.modes, self.max_new_tokens = tuple(modes), max_new_tokens
        self.timing_dialogues = timing_dialogues
        self.model: Any = None
        self._generator: TraceGenerator | None = None
        self._rows: list[dict[str, Any]] = []

    def configure_model(self) -> None:
        """Load the merged model (Lightning moves it)."""
        if self.model is None:
            self.model = load_merged(self.start.source)
            self.tokens = load_tokens(self.start.source).extend()
            extend_vocabulary(self.model, self.tokens)

    @property
    def generator(self) -> TraceGenerator:
        """The decoder over the loaded model, on the device Lightning put it."""
        if self._generator is None:
            self._generator = TraceGenerator(make_policy(self.model), self.tokens)
        return self._generator

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        """Dialogues are text and stay where they are."""
        return batch

    def test_step(self, batch: list[HeldOutDialogue], batch_idx: int) -> None:
        """Write the plans of some dialogues in every mode."""
        turns = [list(dialogue.turns) for dialogue in batch]
        for mode in self.modes:
            if mode == "baseline":
                plans = [baseline_plans(dialogue) for dialogue in batch]
            elif mode == "reset":
                plans = self._reset_plans(batch)
            else:
                plans = write_plans(
                    self.generator, turns, constrained=mode != "raw", max_new_tokens=self.max_new_tokens
                )
            for dialogue, written in zip(batch, plans, strict=True):
                self._rows += prediction_rows(dialogue, mode, written)

    def _reset_plans(self, batch: Sequence[HeldOutDialogue]) -> list[list[Generated]]:
        """Every turn from an empty state; only the number of the next trace is known."""
        written: list[list[Generated]] = [[] for _ in batch]
        next_id = [1] * len(batch)
        for turn in range(max(len(dialogue.turns) for dialogue in batch)):
            live = [i for i, dialogue in enumerate(batch) if len(dialogue.turns) > turn]
            sessions = self.generator.start(len(live))
            sessions.next_id = [next_id[i] for i in live]
            questions = [batch[i].turns[turn].question for i in live]
            plans = self.generator.generate(sessions, questions, max_new_tokens=self.max_new_tokens)
            for i, plan, after in zip(live, plans, sessions.next_id, strict=True):
                written[i].append(plan)
                next_id[i] = after
        return written

    def on_test_epoch_end(self) -> None:
        """Put the rows of all processes together; the main process measures and writes."""
        rows = gather(self._rows)
        self._rows = []
        if not self.trainer.is_global_zero:
            return
        run = Path(self.trainer.default_root_dir)
        rows.sort(key=lambda row: (MODES.index(row["mode"]), row["bin"], row["dialogue"], row["turn"]))
        write_jsonl(run / "predictions.jsonl", rows)
        metrics = measure(rows)
        write_metrics(run, read_metrics(run) | metrics)
        figures = {"plans_by_length": bins_figure(metrics)}
        if timings := self._timings():
            write_jsonl(run / "timings.jsonl", timings)
            figures["seconds_per_turn"] = timings_figure({self.start.name: timings})
        for name, figure in figures.items():
            figure.savefig(run / f"{name}.png", dpi=150)
            for logger in self.trainer.loggers:
                if isinstance(logger, TensorBoardLogger):
                    logger.experiment.add_figure(f"test/{name}", figure, close=False)
        print_bins(run, metrics)

    def _timings(self) -> list[dict[str, Any]]:
        """Seconds of every turn of the longest dialogues, one dialogue at a time; a first turn warms up."""
        dialogues = sorted(self.trainer.datamodule.dialogues, key=lambda d: -len(d.turns))  # type: ignore[attr-defined]
        chosen = dialogues[: self.timing_dialogues]
        rows = []
        for dialogue in chosen:
            self.generator.generate(self.generator.start(1), [dialogue.turns[0].question])
            sessions = self.generator.start(1)
            for t, turn in enumerate(dialogue.turns, start=1):
                begin = time.perf_counter()
                (plan,) = self.generator.generate(
                    sessions, [turn.question], max_new_tokens=self.max_new_tokens
                )
                seconds = time.perf_counter() - begin
                rows.append(
                    {"dialogue": dialogue.id, "turn": t, "seconds": round(seconds, 6), "tokens": len(plan.token_ids)}
                )  # fmt: skip
        return rows


def baseline_plans(dialogue: HeldOutDialogue) -> list[Generated]:
    """One trace a turn: the question as it stands, no dependencies."""
    return [
        Generated(TracePlan((TraceDraft(t, turn.question, keywords(turn.question)),)), (), True)
        for t, turn in enumerate(dialogue.turns, start=1)
    ]


def prediction_rows(
    dialogue: HeldOutDialogue, mode: str, written: Sequence[Generated]
) -> list[dict[str, Any]]:
    """One row of predictions.jsonl a turn."""
    pairs = plan_pairs([written], [dialogue.turns])
    return [
        {
            "mode": mode,
            "bin": dialogue.bin,
            "dialogue": dialogue.id,
            "turn": t,
            "operator": dialogue.operators[t - 1],
            "hops": dialogue.hops[t - 1],
            "cross_turn": dialogue.cross[t - 1],
            "question": turn.question,
            "plan": linearise(plan.plan) if plan.plan is not None and plan.valid else None,
            "valid": plan.valid,
            "error": plan.error,
            "gold": linearise(turn.plan),
            "_pair": pairs[t - 1],
        }
        for t, (turn, plan) in enumerate(zip(dialogue.turns, written, strict=True), start=1)
    ]


def measure(rows: Iterable[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Plan metrics of every mode: over all turns, and by bin, hops, operator and cross-turn dependencies."""
    groups: dict[tuple[str, str], list[Any]] = defaultdict(list)
    for row in rows:
        hops = f"hops-{row['hops']}"
        names = ["", row["bin"], hops, row["operator"], "cross-turn" if row["cross_turn"] else "in-turn"]
        if row["cross_turn"]:
            names.append(f"{row['bin']}/cross-turn")
        for name in names:
            groups[row["mode"], name].append(row["_pair"])
    metrics = {}
    for (mode, group), pairs in groups.items():
        for name, value in aggregate_plan_metrics(pairs).items():
            metrics[metric_name(mode, name, group)] = value
    return metrics


def write_jsonl(file: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write rows whole, sorted keys; keys that begin with an underscore stay in memory."""
    partial = file.with_name(file.name + ".partial")
    with partial.open("w", encoding="utf-8") as stream:
        for row in rows:
            kept = {key: value for key, value in row.items() if not key.startswith("_")}
            stream.write(json.dumps(kept, ensure_ascii=False, sort_keys=True) + "\n")
    partial.replace(file)
