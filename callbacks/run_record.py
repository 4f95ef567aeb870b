"""The beginning and the end of a run: held-out metrics before and after training, and the export of the best weights.

In:  a module with `held_out_metrics()`, `load_state_dict()` and `export(directory, state)`.
Out: runs/NAME/metrics.json (`before/…`, `after/…`; formats.md) and runs/NAME/export/.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint

from callbacks.checkpoint import RunCheckpoints, trained_state


class RunRecord(Checkpoint):
    """Measures before and after, loads the best checkpoint in between, and exports it.

    A Checkpoint by name, because Lightning calls those after all other callbacks: it must see the last save, and the
    end of training is the last moment at which the model is still on its device.

    Args:
        directory: the run directory.
    """

    def __init__(self, directory: str) -> None:
        self.directory = Path(directory)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Measures the start; a resumed run keeps what was measured when it began."""
        if trainer.ckpt_path is None and hasattr(pl_module, "held_out_metrics"):
            self._record(trainer, "before", pl_module.held_out_metrics())  # type: ignore[operator]

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Measures and exports the best checkpoint (the last one, where nothing was monitored)."""
        state = None
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, RunCheckpoints):
                path = callback.best_path if callback.best_score is not None else callback.last_path
                state = trained_state(path)
                pl_module.load_state_dict(state)
        if hasattr(pl_module, "held_out_metrics"):
            self._record(trainer, "after", pl_module.held_out_metrics())  # type: ignore[operator]
        if trainer.is_global_zero and hasattr(pl_module, "export"):
            pl_module.export(self.directory / "export", state)  # type: ignore[operator]
        trainer.strategy.barrier("export")

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """`validate`: measures the loaded checkpoint, under plain names."""
        if trainer.state.fn != "validate" or not hasattr(pl_module, "held_out_metrics"):
            return
        metrics = pl_module.held_out_metrics()  # type: ignore[operator]
        if trainer.is_global_zero:
            write_metrics(self.directory, read_metrics(self.directory) | metrics)

    def _record(self, trainer: Trainer, when: str, metrics: dict[str, Any]) -> None:
        if trainer.is_global_zero:
            kept = {
                name: value
                for name, value in read_metrics(self.directory).items()
                if not name.startswith(f"{when}/")
            }
            write_metrics(self.directory, kept | {f"{when}/{name}": value for name, value in metrics.items()})


def read_metrics(run: Path) -> dict[str, Any]:
    """metrics.json of a run, or nothing where there is none yet."""
    file = run / "metrics.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def write_metrics(run: Path, metrics: dict[str, Any]) -> Path:
    """Write metrics.json whole: sorted keys, one metric a line."""
    file = run / "metrics.json"
    lines = [f"  {json.dumps(name)}: {json.dumps(metrics[name], sort_keys=True)}" for name in sorted(metrics)]
    partial = file.with_name("metrics.json.partial")
    partial.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    partial.replace(file)
    return file
