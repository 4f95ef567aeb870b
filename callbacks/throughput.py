"""Speed and gradient norm of training, for TensorBoard.

In:  packed batches and gradients as they pass.
Out: `speed/plan_tokens_per_second` (tokens that carry loss), `speed/tokens_per_second` (all that are not padding),
     `train/real_token_share` (what packing leaves of the row), `train/grad_norm` (before clipping).
"""

from __future__ import annotations

import time
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.optim import Optimizer


class Throughput(Callback):
    """Tokens per second over all processes since the last log, validation and checkpoints not counted."""

    def __init__(self) -> None:
        self._reset()

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Starts the clock."""
        self._began = time.perf_counter()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Counts the batch; logs every `log_every_n_steps` optimizer steps."""
        if not hasattr(batch, "plan_tokens"):
            return
        self._seconds += time.perf_counter() - self._began
        self._plan += batch.plan_tokens
        self._tokens += batch.tokens
        self._places += batch.input_ids_BL.numel()
        if (trainer.fit_loop.epoch_loop.batch_idx + 1) % (
            trainer.log_every_n_steps * trainer.accumulate_grad_batches
        ):
            return
        world = trainer.world_size
        pl_module.log_dict(
            {
                "speed/plan_tokens_per_second": world * self._plan / self._seconds,
                "speed/tokens_per_second": world * self._tokens / self._seconds,
                "train/real_token_share": self._tokens / self._places,
            },
            on_step=True,
            on_epoch=False,
            batch_size=1,
        )
        self._reset()

    def _reset(self) -> None:
        self._seconds = 0.0
        self._began = 0.0
        self._plan = self._tokens = self._places = 0


class GradientNorm(Callback):
    """Logs the norm of all gradients of a step, before clipping."""

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer
    ) -> None:
        """Reads the gradients, or asks DeepSpeed, which keeps them to itself."""
        engine = getattr(trainer.strategy, "deepspeed_engine", None)
        if engine is not None:
            norm = engine.get_global_grad_norm()  # of the step before
            if norm is None:
                return
        else:
            gradients = [p.grad for p in pl_module.parameters() if p.grad is not None]
            norm = torch.nn.utils.get_total_norm(gradients)
        pl_module.log("train/grad_norm", float(norm), on_step=True, on_epoch=False, batch_size=1)
