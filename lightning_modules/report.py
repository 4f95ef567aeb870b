"""What `fit` prints at its end: held-out metrics before and after, where things were written, what to type next."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from rich.console import Console
from rich.table import Table

NEXT_STAGE = {"pretrain": "stage1", "stage1": "stage2", "stage2": "stage3"}
SHARES = (
    "plan_exact_match",
    "hop_count_accuracy",
    "sub_question_f1",
    "dependency_f1",
    "keyword_f1",
    "plan_valid",
)


def print_report(run: Path, metrics: dict[str, Any], trainer: Trainer) -> None:
    """Print the table and the lines below it.

    Args:
        run: runs/NAME.
        metrics: what metrics.json holds.
        trainer: the finished trainer, for its step count.
    """
    console = Console(highlight=False, width=None if Console().is_terminal else 110)
    table = Table(title=f"held-out development set, {run.name}", title_justify="left")
    for column in ("metric", "before", "after", "95 % interval", "n"):
        table.add_column(column, justify="left" if column == "metric" else "right")
    for name in _order(metrics):
        before, after = metrics.get(f"before/{name}"), metrics.get(f"after/{name}")
        interval = (
            ""
            if after is None or after["low"] is None
            else f"{_show(name, after['low'])} – {_show(name, after['high'])}"
        )
        n = (after or before or {}).get("n", "")
        table.add_row(
            name, *(_show(name, m["value"]) if m else "" for m in (before, after)), interval, f"{n:,}"
        )
    console.print(table)
    console.print(
        f"trained {trainer.global_step} steps; written to {run}/: metrics.json, config.yaml, checkpoints/,"
    )
    console.print("  tensorboard/, export/ (adapter/ and merged/, a stock Hugging Face directory)")
    console.print("next:")
    console.print(f"  {_bin()}tensorboard --logdir {run}")
    if run.name in NEXT_STAGE:
        console.print(f"  {_bin()}python -m lightning_modules.cli fit --config {NEXT_STAGE[run.name]}.yaml")


BIN_COLUMNS = (
    "plan_exact_match",
    "dependency_f1",
    "sub_question_f1",
    "keyword_f1",
    "hop_count_accuracy",
    "plan_valid",
)


def print_bins(run: Path, metrics: dict[str, Any]) -> None:
    """Print the table of a test: a row for every mode and group of turns that metrics.json holds."""
    console = Console(highlight=False, width=None if Console().is_terminal else 170)
    table = Table(title=f"test dialogues, {run.name}", title_justify="left")
    for column in ("mode", "turns of", "n", *BIN_COLUMNS):
        table.add_column(
            column.replace("_", " "), justify="left" if column in ("mode", "turns of") else "right"
        )
    mode_before = None
    for mode, group in measured_groups(metrics):
        row = [metrics[metric_name(mode, name, group)] for name in BIN_COLUMNS]
        if mode_before not in (None, mode):
            table.add_section()
        mode_before = mode
        values = [f"{100 * value['value']:.1f} %" for value in row]
        table.add_row(mode, group or "all", f"{row[0]['n']:,}", *values)
    console.print(table)
    console.print(f"written to {run}/: metrics.json (with intervals), predictions.jsonl, plots as PNG")


def metric_name(mode: str, name: str, group: str) -> str:
    """The key in metrics.json of a metric in a mode and a group of turns ("" is all turns)."""
    prefix = "" if mode == "carried" else f"{mode}/"
    return f"{prefix}{name}{f'/{group}' if group else ''}"


def measured_groups(metrics: dict[str, Any]) -> list[tuple[str, str]]:
    """(mode, group) of every test result: all turns first, then the groups by name."""
    found: list[tuple[str, str]] = []
    for key in metrics:
        head, _, rest = key.partition("/")
        mode, name, group = ("carried", head, rest) if head in BIN_COLUMNS else (head, *_split(rest))
        if name == "plan_exact_match":
            found.append((mode, group))
    modes = list(dict.fromkeys(mode for mode, _ in found))
    return sorted(found, key=lambda pair: (modes.index(pair[0]), pair[1]))


def _split(key: str) -> tuple[str, str]:
    name, _, group = key.partition("/")
    return name, group


def _bin() -> str:
    """What a command of this environment needs in front of it in the user's shell: nothing where it is activated."""
    folder = Path(sys.prefix) / "bin"
    found = shutil.which("python")
    if sys.prefix == sys.base_prefix or (found is not None and Path(found).parent == folder):
        return ""
    return f"{folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder}/"


def _order(metrics: dict[str, Any]) -> list[str]:
    names = {name.partition("/")[2] for name in metrics if name.startswith(("before/", "after/"))}
    known = ["val_loss", *SHARES]
    return [name for name in known if name in names] + sorted(names - set(known))


def _show(name: str, value: float) -> str:
    return f"{100 * value:.1f} %" if name.split("/")[0] in SHARES else f"{value:.4f}"
