"""Plots of tests: plan quality by length of the dialogue, and seconds per turn by the turn's place in it.

In:  metrics.json of a test (lightning_modules/trace_test.py), timings.jsonl. Out: matplotlib figures, PNG files.

    python -m lightning_modules.plots runs/A runs/B --out seconds_per_turn.png     # the timings of several runs in one
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from matplotlib.figure import Figure

from datamodules.dialogue_bins import BINS
from lightning_modules.report import metric_name

_SERIES = (
    ("carried", "plan_exact_match", "exact, state carried", "#1f6fb4", "o-"),
    ("reset", "plan_exact_match", "exact, state reset each turn", "#d1622b", "o--"),
    ("carried", "dependency_f1", "dependency F1, state carried", "#2c8c5a", "s-"),
    ("reset", "dependency_f1", "dependency F1, state reset each turn", "#9aa23c", "s--"),
)


def bins_figure(metrics: Mapping[str, Mapping[str, Any]]) -> Figure:
    """Plan exact match and dependency F1 by bin with 95 % intervals, for the modes that were measured."""
    figure = Figure(figsize=(7.5, 4.5), layout="constrained")
    axes = figure.subplots()
    bins = [name for name in BINS if metric_name("carried", "plan_exact_match", name) in metrics
            or metric_name("reset", "plan_exact_match", name) in metrics]  # fmt: skip
    for shift, (mode, metric, label, colour, style) in enumerate(_SERIES):
        found = [
            (at, metrics[key])
            for at, name in enumerate(bins)
            if (key := metric_name(mode, metric, name)) in metrics
        ]
        if not found:
            continue
        x = [at + 0.06 * (shift - 1.5) for at, _ in found]
        y = [100 * value["value"] for _, value in found]
        below = [max(0.0, 100 * (value["value"] - value["low"])) for _, value in found]
        above = [max(0.0, 100 * (value["high"] - value["value"])) for _, value in found]
        axes.errorbar(x, y, [below, above], fmt=style, color=colour, label=label, capsize=3, markersize=5)
    labels = [
        f"{name.replace('-', ' ', 1).replace('-', '–')} turns\nn = {_n(metrics, name):,}" for name in bins
    ]
    axes.set_xticks(range(len(bins)), labels)
    axes.set_ylim(0, 102)
    axes.set_ylabel("per cent of turns (exact), per cent (F1)")
    axes.grid(axis="y", alpha=0.3)
    axes.legend(loc="lower left")
    axes.set_title("Plans by length of the dialogue")
    return figure


def _n(metrics: Mapping[str, Mapping[str, Any]], name: str) -> int:
    for mode in ("carried", "reset"):
        if (key := metric_name(mode, "plan_exact_match", name)) in metrics:
            return int(metrics[key]["n"])
    return 0


def timings_figure(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> Figure:
    """Seconds per turn by turn number, one colour a run: a dot a turn, a line for the mean over dialogues."""
    figure = Figure(figsize=(7.5, 4.5), layout="constrained")
    axes = figure.subplots()
    for colour, (name, rows) in zip(("#1f6fb4", "#d1622b", "#2c8c5a", "#8557a5"), runs.items(), strict=False):
        turns = sorted({row["turn"] for row in rows})
        means = [mean(row["seconds"] for row in rows if row["turn"] == turn) for turn in turns]
        axes.scatter(
            [row["turn"] for row in rows], [row["seconds"] for row in rows], s=8, alpha=0.35, color=colour
        )
        axes.plot(turns, means, color=colour, label=name)
    axes.set_xlabel("turn of the dialogue")
    axes.set_ylabel("seconds per turn")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    axes.set_title("Time to write a turn's plan, one dialogue at a time")
    return figure


def read_timings(run: Path) -> list[dict[str, Any]]:
    """timings.jsonl of a test run. FileNotFoundError or ValueError name the file and the line."""
    file = run / "timings.jsonl"
    if not file.is_file():
        raise FileNotFoundError(
            f"{file} does not exist: {run} is no test run, or timed no dialogue (model.timing_dialogues)"
        )
    rows = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            row = json.loads(line)
            rows.append({"turn": int(row["turn"]), "seconds": float(row["seconds"])})
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"{file}:{number}: not a row of timings with turn and seconds") from None
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m lightning_modules.plots", description="Plot seconds per turn of test runs."
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="runs/NAME of `test`")
    parser.add_argument("--out", type=Path, default=Path("seconds_per_turn.png"), help="PNG file to write")
    args = parser.parse_args(argv)
    try:
        figure = timings_figure({run.name: read_timings(run) for run in args.runs})
        figure.savefig(args.out, dpi=150)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"wrote {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
