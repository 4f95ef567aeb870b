"""Random number generators in checkpoints, so that a resumed run draws what an uninterrupted one would have drawn.

In:  the states of torch (CPU and this process's GPU), numpy and python, on every process.
Out: the same states, set again right before the first batch after a resume. Lightning restores none of them, and LoRA
     dropout draws from torch's.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer


class RngState(Callback):
    """Saves and restores generator states per process. Resuming needs as many processes as saved."""

    def __init__(self) -> None:
        self._pending: list[dict[str, Any]] | None = None

    def state_dict(self) -> dict[str, Any]:
        """States of all processes, by rank. Every process calls it (Lightning builds the checkpoint on each)."""
        mine = capture()
        if not (dist.is_available() and dist.is_initialized()):
            return {"ranks": [mine]}
        ranks: list[dict[str, Any]] = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(ranks, mine)
        return {"ranks": ranks}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keeps the states until training begins: building and validating draw numbers in between."""
        self._pending = state_dict["ranks"]

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Puts the states back before the first batch after a resume."""
        if self._pending is None:
            return
        if len(self._pending) != trainer.world_size:
            raise ValueError(
                f"the checkpoint holds the random states of {len(self._pending)} processes, this run has "
                f"{trainer.world_size}: resume with as many devices"
            )
        restore(self._pending[trainer.global_rank])
        self._pending = None


def capture() -> dict[str, Any]:
    """The generators' states as plain types and tensors (a checkpoint is read without pickle)."""
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    version, numbers, gauss = random.getstate()
    state = {
        "torch": torch.get_rng_state(),
        "numpy": [name, torch.from_numpy(np.asarray(keys, dtype=np.int64)), position, has_gauss, cached],
        "python": [version, torch.tensor(numbers, dtype=torch.int64), gauss],
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore(state: dict[str, Any]) -> None:
    """Sets what `capture` returned."""
    torch.set_rng_state(state["torch"].cpu())
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, keys.cpu().numpy().astype(np.uint32), position, has_gauss, cached))
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers.tolist()), gauss))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"].cpu())
