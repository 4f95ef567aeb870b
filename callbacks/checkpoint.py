"""Checkpoints of a run: `last` every N optimizer steps to resume from, `best` by a validation metric to export.

In:  the trainer's state after an optimizer step or a validation.
Out: DIR/last.ckpt and DIR/best.ckpt, each replaced whole (a killed process leaves the former one). They hold what the
     module's state_dict holds (adapters and new rows, where the base is frozen), optimizer, loops, loader and random
     states. CMT-RAG B.3: checkpoints are selected by validation loss.

Lightning's own ModelCheckpoint saves `last` before a validation that falls on the same step and skips that validation
after a resume, so the best checkpoint could differ; here such a save waits until the validation is over.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint


class RunCheckpoints(Checkpoint):
    """Keeps `last` and `best`.

    Args:
        every_n_steps: optimizer steps between two saves of `last`.
        monitor: metric that decides what is best; null keeps only `last`.
        mode: whether small or large values are good.
        directory: where; the command line fills in runs/NAME/checkpoints.
    """

    def __init__(
        self,
        every_n_steps: int = 50,
        monitor: str | None = "val/loss",
        mode: Literal["min", "max"] = "min",
        directory: str | None = None,
    ) -> None:
        if every_n_steps < 1:
            raise ValueError(f"checkpoint.every_n_steps is {every_n_steps}: it must be 1 or more")
        self.every_n_steps, self.monitor, self.mode = every_n_steps, monitor, mode
        self.directory = directory
        self.best_score: float | None = None
        self._last_saved = 0

    @property
    def last_path(self) -> Path:
        """The checkpoint to resume from (a folder under DeepSpeed)."""
        return Path(self.directory or "checkpoints") / "last.ckpt"

    @property
    def best_path(self) -> Path:
        """The checkpoint with the best score so far."""
        return Path(self.directory or "checkpoints") / "best.ckpt"

    def state_dict(self) -> dict[str, Any]:
        """The best score so far, and the step of the last save."""
        return {"best_score": self.best_score, "last_saved": self._last_saved}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on from there."""
        self.best_score, self._last_saved = state_dict["best_score"], state_dict["last_saved"]

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Saves `last` when it is due, unless a validation comes first."""
        loop = trainer.fit_loop.epoch_loop
        validates_now = trainer.enable_validation and loop._should_check_val_fx(
            trainer.fit_loop._data_fetcher
        )
        if self._due(trainer) and not validates_now:
            self._save_last(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Saves `best` where the metric improved, and `last` where it was due."""
        if trainer.sanity_checking or trainer.state.fn != "fit":
            return
        if self.monitor is not None:
            score = trainer.callback_metrics.get(self.monitor)
            if score is None:
                known = ", ".join(sorted(trainer.callback_metrics)) or "none"
                raise ValueError(
                    f"checkpoint.monitor is {self.monitor}, which is not among the metrics: {known}"
                )
            if self._improves(float(score)):
                self.best_score = float(score)
                trainer.save_checkpoint(self.best_path)
        if self._due(trainer):
            self._save_last(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Saves `last` at the end, so that training can be prolonged."""
        if trainer.global_step != self._last_saved:
            self._save_last(trainer)

    def _due(self, trainer: Trainer) -> bool:
        return trainer.global_step - self._last_saved >= self.every_n_steps

    def _save_last(self, trainer: Trainer) -> None:
        self._last_saved = trainer.global_step
        trainer.save_checkpoint(self.last_path)

    def _improves(self, score: float) -> bool:
        if score != score:  # nan is never best
            return False
        if self.best_score is None:
            return True
        return score < self.best_score if self.mode == "min" else score > self.best_score


def trained_state(path: Path) -> dict[str, torch.Tensor]:
    """The trained weights of a checkpoint, fp32 where DeepSpeed kept fp32 masters.

    Raises FileNotFoundError where there is none.
    """
    if path.is_dir():  # DeepSpeed writes a folder of shards
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

        return get_fp32_state_dict_from_zero_checkpoint(
            str(path), tag="checkpoint", exclude_frozen_parameters=True
        )
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such checkpoint")
    return torch.load(path, map_location="cpu", weights_only=True)["state_dict"]
