"""Run directories, and where a stage starts from. design.md section 3 ("Training", "Finding things").

runs/NAME/ holds config.yaml (resolved), checkpoints/, tensorboard/, metrics.json and export/. Where no start is named,
it is the predecessor's run if there is one, else the shipped asset of that stage; which one it was is said in one line.
"""

from __future__ import annotations

import logging
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch

from inference import smollm2
from inference.exports import ASSET_OF_RUN, ASSETS, find_base, open_source

log = logging.getLogger("trace_memory.train")
RUNS = Path("runs")
# What a run writes; --overwrite removes these and nothing else.
RUN_FILES = ("config.yaml", "metrics.json", "predictions.jsonl", "timings.jsonl")
RUN_FOLDERS = ("checkpoints", "tensorboard", "export")


@dataclass(frozen=True)
class Start:
    """What a stage starts from.

    Attributes:
        name: how base.json calls it.
        source: the export or model directory that was found.
        weights: the export or model directory whose merged weights are the base.
        adapter: the adapter directory that goes on training, or None.
    """

    name: str
    source: Path
    weights: Path
    adapter: Path | None


def resolve_start(
    init_from: str | None, predecessor: str | None, adapter: str, allow_assets: bool = True
) -> Start:
    """Find what to start from; only paths are touched, nothing is loaded.

    Raises:
        FileNotFoundError: an explicit `init_from` is missing, or nothing is found.
        ValueError: neither is named, or there is no adapter to continue.
    """
    if init_from is not None:
        if not Path(init_from).exists() and init_from != smollm2.NAME:
            raise FileNotFoundError(
                f"model.init_from {init_from} does not exist. Name a run (runs/NAME), an export directory, or a model "
                "directory with config.json, *.safetensors and tokenizer.json; models are never downloaded"
            )
        source = open_source(init_from)
        log.info("starting from %s", init_from)
    else:
        source = _predecessor(predecessor, allow_assets)
    return start_at(source, adapter)


def start_at(source: Path, adapter: str) -> Start:
    """The start at an export or model directory. ValueError where `adapter` is `continue` and there is none."""
    name = source.parent.name if source.name == "export" else source.name
    if adapter != "continue":
        return Start(name, source, source, None)
    if not (source / "adapter").is_dir():
        raise ValueError(
            f"model.adapter is continue, but {source} has no adapter/: it is a whole model, start a new one on it"
        )
    base = find_base(source)
    base_name = base.parent.name if base.name == "export" else base.name
    return Start(base_name, source, base, source / "adapter")


def _predecessor(name: str | None, allow_assets: bool) -> Path:
    if name is None:
        raise ValueError("nothing to start from: set model.init_from, or model.predecessor to a run's name")
    run, asset = RUNS / name, ASSETS / ASSET_OF_RUN.get(name, name)
    unfinished = ""
    if run.is_dir():
        if (run / "export" / "base.json").is_file():
            log.info("starting from %s, the predecessor's run", run)
            return run / "export"
        unfinished = f" ({run} is there, but holds no finished export)"
    if allow_assets and asset.is_dir():
        log.info("starting from the shipped %s%s", asset.name, unfinished or f" (no {run} here)")
        return open_source(asset)
    shipped = (
        f"and no asset {asset.name} is shipped" if allow_assets else "and shipped assets are not allowed here"
    )
    raise FileNotFoundError(
        f"nothing to start from: no {run}{unfinished} {shipped}. Run the earlier stage first "
        f"(fit --config {name}.yaml), or name a directory with --model.init_from"
    )


def run_directory(name: str) -> Path:
    """runs/NAME. ValueError where the name is more than a folder's: a run never leaves runs/."""
    if not re.fullmatch(r"[\w][\w.+=-]*", name):
        raise ValueError(
            f"--name {name!r}: a run's name is letters, digits and . _ + = -, beginning with a letter or digit"
        )
    return RUNS / name


def check_checkpoint(path: str) -> None:
    """FileNotFoundError or ValueError where a path holds no checkpoint of a run (a file, or DeepSpeed's folder)."""
    file = Path(path)
    if not path or not file.exists():
        raise FileNotFoundError(f"--ckpt_path {path or repr(path)} does not exist")
    if file.is_dir():
        if not (file / "checkpoint").is_dir():
            raise ValueError(
                f"--ckpt_path {path} is a directory: name the file in it, checkpoints/last.ckpt of a run"
            )
        return
    try:
        state = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # torch raises several kinds for a truncated or foreign file
        raise ValueError(
            f"--ckpt_path {path}: no checkpoint, damaged or half written ({type(error).__name__})"
        ) from None
    if not isinstance(state, dict) or not {"state_dict", "loops", "trace_memory"} <= state.keys():
        raise ValueError(
            f"--ckpt_path {path} is not a checkpoint of a run; to start from weights use --model.init_from"
        )


def claim(run: Path, resuming: bool, overwrite: bool) -> None:
    """Make the run directory, or refuse it. The main process calls it before anything is written.

    Raises:
        FileExistsError: it holds a run already and neither resumes nor overwrites it, or it holds something else.
    """
    if run.exists() and not run.is_dir():
        raise FileExistsError(f"{run} is a file, not a run directory: choose another --name")
    found = sorted(path.name for path in run.iterdir()) if run.is_dir() else []
    foreign = [name for name in found if name not in (*RUN_FILES, *RUN_FOLDERS)]
    if found and len(foreign) == len(found):
        raise FileExistsError(f"{run} holds {foreign[0]}, which no run wrote: choose another --name")
    # A start that failed leaves settings and an empty log, which nobody misses.
    holds_a_run = any(name not in ("config.yaml", "tensorboard", *foreign) for name in found)
    if resuming:
        run.mkdir(parents=True, exist_ok=True)
        return
    if holds_a_run and not overwrite:
        last = run / "checkpoints" / "last.ckpt"
        how = f"--ckpt_path {last} to resume it, " if last.exists() else ""
        raise FileExistsError(
            f"{run} already holds a run: give {how}--overwrite to replace it, or another --name"
        )
    for name in RUN_FOLDERS:
        shutil.rmtree(run / name, ignore_errors=True)
    for name in RUN_FILES:
        (run / name).unlink(missing_ok=True)
    run.mkdir(parents=True, exist_ok=True)
