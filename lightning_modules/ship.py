"""Turn finished runs into the assets that a fresh clone starts from: `python -m lightning_modules.ship RUN…`.

In:  runs/pretrain (a whole model) and runs/stageN (adapters), each with export/, metrics.json and config.yaml.
Out: inference/assets/mamba2-tiny/ (weights in bf16, tokenizer, model card) and inference/assets/stageN/ (adapter,
     base.json, model card).  design.md section 4: the embedded default and its budget.

Ship the base first and train the stages from it: an adapter is bound to the very weights it was trained on.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path

import torch
import yaml  # type: ignore[import-untyped]

from callbacks.run_record import read_metrics
from inference.exports import ASSET_OF_RUN, ASSETS, load_merged, load_tokens, open_source, read_base
from inference.model import export_merged


def ship(run: Path, command: str) -> Path:
    """Copy what a fresh clone needs of a run into the assets; returns the asset's directory.

    Raises:
        FileNotFoundError: the run has not ended.
    """
    source = open_source(run)
    for name in ("config.yaml", "metrics.json"):
        if not (run / name).is_file():
            raise FileNotFoundError(
                f"{run / name} does not exist: {run} is not a run that has ended (runs/NAME)"
            )
    name = ASSET_OF_RUN.get(run.resolve().name, run.resolve().name)
    target, partial = ASSETS / name, ASSETS / f"{name}.partial"
    text = card(run, name, command)
    shutil.rmtree(partial, ignore_errors=True)
    try:
        if (source / "adapter").is_dir():
            partial.mkdir(parents=True)
            shutil.copytree(source / "adapter", partial / "adapter")
            # The base is found by its name among the assets, on any machine.
            if read_base(source) is None:
                raise ValueError(f"{source / 'base.json'}: names no base for the adapter beside it")
            record = json.loads((source / "base.json").read_text(encoding="utf-8"))
            base = ASSET_OF_RUN.get(record["base"]["name"], record["base"]["name"])
            record["base"] |= {"name": base, "path": f"../{base}"}
            (partial / "base.json").write_text(
                json.dumps(record, indent=2, sort_keys=True) + "\n", encoding="utf-8"
            )
        else:
            model, tokens = load_merged(source), load_tokens(source)
            export_merged(model, tokens, partial, dtype=torch.bfloat16)
        (partial / "README.md").write_text(text, encoding="utf-8")
        shutil.rmtree(
            target, ignore_errors=True
        )  # only now: a run that cannot be shipped leaves the old asset
        partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return target


def card(run: Path, name: str, command: str) -> str:
    """The model card: what it is, the command, the data, the metrics as the run measured them."""
    config = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))
    metrics = read_metrics(run)
    if not isinstance(config, dict) or not isinstance(config.get("data"), dict):
        raise ValueError(f"{run / 'config.yaml'}: key data is missing, so no run wrote it")
    data = {k: v for k, v in config["data"].get("init_args", {}).items() if v is not None}
    rows = []
    for key, m in sorted(metrics.items()):
        interval = "" if m["low"] is None else f"{m['low']:.4f} – {m['high']:.4f}"
        rows.append(f"| {key} | {m['value']:.4f} | {interval} | {m['n']} |")
    return "\n".join(
        [
            f"# {name}",
            "",
            "Trained by this project from random weights on this project's own fictional world; no third-party text.",
            "Licence: Apache-2.0, as the code.",
            "",
            f"Command: `{command}`",
            "",
            f"Data: `{config['data']['class_path']}` with `{json.dumps(data, sort_keys=True)}`.",
            "",
            "Metrics on held-out entities, as the run wrote them (bf16 autocast on a CPU):",
            "",
            "| metric | value | 95 % interval | n |",
            "|---|---|---|---|",
            *rows,
            "",
        ]
    )


def main(arguments: list[str] | None = None) -> int:
    """Ship the named runs in order; 2 with a message when one is not there."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path, help="run directories, the base first")
    parser.add_argument("--command", help="what made the run, where it is more than `fit --config NAME.yaml`")
    args = parser.parse_args(arguments)
    for run in args.runs:
        try:
            made = f"python -m lightning_modules.cli fit --config {run.resolve().name}.yaml"
            target = ship(run, args.command or made)
        except (OSError, ValueError, yaml.YAMLError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        size = sum(f.stat().st_size for f in target.rglob("*") if f.is_file()) / 1e6
        print(f"wrote {target} ({size:.1f} MB)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
