"""A run that is killed and resumed ends with the same bits as one that was not: weights, optimizer, best checkpoint.

LoRA dropout is on, so the random state matters; saves fall in the middle of an epoch, on validations and on its end.
"""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback

from tests.tiny_training import fit_arguments, run_forked, tiny

EVERY, EPOCHS = 2, 3
STEPS_PER_EPOCH = 5  # 20 dialogues, batch 2, accumulate 2


class KillAt(Callback):
    """SIGKILL at the end of a training batch: nothing is flushed, no handler runs."""

    def __init__(self, batch: int) -> None:
        self.batch, self.seen = batch, 0

    def on_train_batch_end(self, *args: Any) -> None:
        self.seen += 1
        if self.seen == self.batch:
            os.kill(os.getpid(), signal.SIGKILL)


def arguments(name: str, *more: str) -> list[str]:
    options: dict[str, Any] = {
        "trainer.accumulate_grad_batches": 2, "trainer.max_epochs": EPOCHS, "trainer.val_check_interval": 5,
        "checkpoint.every_n_steps": EVERY, "model.dropout": 0.1, "name": name,
    }  # fmt: skip
    return [*fit_arguments(**options), *more]


def state(folder: Path, name: str, which: str = "last") -> dict[str, Any]:
    return torch.load(folder / "runs" / name / "checkpoints" / f"{which}.ckpt", weights_only=True)


def assert_same_bits(a: Any, b: Any, where: str = "") -> None:
    if isinstance(a, torch.Tensor):
        assert torch.equal(a, b), where
    elif isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for key in a:
            assert_same_bits(a[key], b[key], f"{where}/{key}")
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), where
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_same_bits(x, y, f"{where}/{i}")
    else:
        assert a == b, where


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run nobody disturbs."""
    tiny()  # before the fork, so that parent and children share it
    folder = tmp_path_factory.mktemp("whole")
    assert run_forked(arguments("run"), folder) == 0
    return folder


# A limit in steps in place of one in epochs: the same run, but Lightning counts otherwise.
BY_STEPS = ("--trainer.max_epochs=-1", f"--trainer.max_steps={EPOCHS * STEPS_PER_EPOCH}")


RANDOM = sorted(random.Random(3).sample(range(5, 30), 2))
QUICK = [
    (RANDOM[0], ()),
    (RANDOM[1], ()),
    (21, BY_STEPS),
]  # after batch 20 of 30 an epoch ends, with a save and a validation
THOROUGH = [(at, limits) for limits in ((), BY_STEPS) for at in range(5, 30) if (at, limits) not in QUICK]


@pytest.mark.parametrize(
    ("kill_at", "limits"),
    [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in THOROUGH)],
    ids=lambda value: value if isinstance(value, int) else ("steps" if value else "epochs"),
)
def test_killed_and_resumed_is_bit_identical(
    whole: Path, tmp_path: Path, kill_at: int, limits: tuple[str, ...]
) -> None:
    assert run_forked(arguments("run", *limits), tmp_path, [KillAt(kill_at)]) == -signal.SIGKILL
    resumed = arguments("run", *limits, "--ckpt_path", "runs/run/checkpoints/last.ckpt")
    before = state(tmp_path, "run")["global_step"]
    assert 0 < before < EPOCHS * STEPS_PER_EPOCH
    assert run_forked(resumed, tmp_path) == 0
    for which in ("last", "best"):
        a, b = state(whole, "run", which), state(tmp_path, "run", which)
        for part in ("state_dict", "optimizer_states", "lr_schedulers", "global_step", "epoch"):
            assert_same_bits(a[part], b[part], f"{which}:{part}")
    assert (tmp_path / "runs/run/metrics.json").read_bytes() == (whole / "runs/run/metrics.json").read_bytes()
