"""One optimizer step does not depend on how its eight dialogues are split up.

Batch 8 x 1, batch 1 x 8 and two DDP processes of batch 2 x 2 run the same dialogues through the real command line. Loss
and gradient norm agree at every step to 1e-5, and so does their mean residual: a dropped or doubly scaled micro-batch
would shift all steps to one side. 20 dialogues make windows of 8, 8 and 4, so the last one of an epoch is partial.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiny_training import REPOSITORY, fit_arguments, run_forked, scalars, tiny

STEPS = 6  # two epochs of three windows


def arguments(name: str, batch: int, accumulate: int, **more: Any) -> list[str]:
    options: dict[str, Any] = {
        "data.batch_size": batch, "trainer.accumulate_grad_batches": accumulate, "trainer.max_epochs": 2,
        "trainer.val_check_interval": 1.0, "model.dropout": 0.0, "name": name, **more,
    }  # fmt: skip
    return fit_arguments(**options)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The three runs."""
    tiny()
    folder = tmp_path_factory.mktemp("accumulation")
    assert run_forked(arguments("8x1", 8, 1), folder) == 0
    assert run_forked(arguments("1x8", 1, 8), folder) == 0
    ddp = arguments("ddp", 2, 2, **{"trainer.strategy": "ddp", "trainer.devices": 2})
    done = subprocess.run(
        [sys.executable, "-m", "lightning_modules.cli", *ddp],
        cwd=folder, env={**os.environ, "PYTHONPATH": str(REPOSITORY)}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.parametrize("other", ["1x8", "ddp"])
@pytest.mark.parametrize("tag", ["train/loss", "train/grad_norm", "val/loss"])
def test_same_trajectory(folder: Path, other: str, tag: str) -> None:
    a, b = scalars(folder / "runs" / "8x1")[tag], scalars(folder / "runs" / other)[tag]
    assert len(a) == (STEPS if tag.startswith("train") else 2)
    assert [step for step, _ in a] == [step for step, _ in b]
    residuals = [(y - x) / abs(x) for (_, x), (_, y) in zip(a, b, strict=True)]
    assert max(map(abs, residuals)) <= 1e-5
    assert abs(sum(residuals) / len(residuals)) <= 5e-6


@pytest.mark.parametrize("other", ["1x8", "ddp"])
def test_same_weights_and_metrics(folder: Path, other: str) -> None:
    one, two = (torch.load(folder / "runs" / name / "checkpoints/last.ckpt", weights_only=True)["state_dict"]
                for name in ("8x1", other))  # fmt: skip
    for name in one:
        torch.testing.assert_close(two[name], one[name], atol=2e-5, rtol=1e-4)
