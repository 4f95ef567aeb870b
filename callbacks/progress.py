"""What a person sees while training: a rich progress bar with loss and validation loss, or plain lines in a log file.

In:  the trainer's progress-bar metrics. Out: the terminal.
"""

from __future__ import annotations

import sys
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import RichProgressBar
from lightning.pytorch.callbacks.progress.rich_progress import RichProgressBarTheme

LINES = 20


class TrainingProgress(RichProgressBar):
    """A bar on a terminal; elsewhere (a pipe, a log) about twenty lines over the whole run.

    Args:
        refresh_rate: batches between two updates of the bar.
    """

    def __init__(self, refresh_rate: int = 1) -> None:
        super().__init__(
            refresh_rate=refresh_rate,
            leave=False,
            theme=RichProgressBarTheme(metrics_format=".4f", metrics_text_delimiter="  "),
        )
        self.terminal = sys.stdout.isatty()
        self._next_line = 1

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """The bar only where there is a terminal."""
        super().setup(trainer, pl_module, stage)
        if not self.terminal:
            self.disable()

    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        """Loss and validation loss, without the logger's version."""
        metrics = super().get_metrics(trainer, pl_module)
        metrics.pop("v_num", None)
        return metrics

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Updates the bar, or prints a line when another twentieth of the run is done."""
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        if self.terminal or not trainer.is_global_zero or not hasattr(pl_module, "total_steps"):
            return
        total = pl_module.total_steps()
        if trainer.global_step * LINES >= self._next_line * total:
            self._next_line = trainer.global_step * LINES // total + 1
            self._line(trainer, total)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Prints the validation loss where there is no bar to show it."""
        super().on_validation_end(trainer, pl_module)
        if self.terminal or trainer.sanity_checking or not trainer.is_global_zero:
            return
        if trainer.state.fn == "fit":
            values = self._values(trainer, "val/")
            print(f"  validated after step {trainer.global_step}: {values}", flush=True)

    def on_test_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Updates the bar, or prints how far the test is."""
        super().on_test_batch_end(trainer, pl_module, outputs, batch, batch_idx, dataloader_idx)
        if not self.terminal and trainer.is_global_zero:
            print(f"  tested batch {batch_idx + 1} of {trainer.num_test_batches[dataloader_idx]}", flush=True)

    def _line(self, trainer: Trainer, total: int) -> None:
        print(f"  step {trainer.global_step:>5} of {total}: {self._values(trainer, 'train/')}", flush=True)

    @staticmethod
    def _values(trainer: Trainer, prefix: str) -> str:
        metrics = {
            name: value for name, value in trainer.progress_bar_metrics.items() if name.startswith(prefix)
        }
        return ", ".join(f"{name} {float(value):.4f}" for name, value in sorted(metrics.items()))
