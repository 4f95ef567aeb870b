"""Plans the generator writes while it learns, as text and as a picture of the trace DAG, in TensorBoard.

In:  a development dialogue and the module that trains. Out: `plans/text` and `plans/dag` after a validation.
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger

from callbacks.dag_picture import dag_figure
from datamodules.packed_data import PlannedTurn
from inference.generator import Generated
from inference.traces import TracePlan, linearise


class PlanSamples(Callback):
    """Writes the plans of a few development dialogues greedily (no random number is drawn).

    Args:
        dialogues: how many.
        every_n_validations: write after every N-th validation.
    """

    def __init__(self, dialogues: int = 1, every_n_validations: int = 1) -> None:
        self.dialogues, self.every_n_validations = dialogues, every_n_validations
        self._validations = 0

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Writes text and picture to every TensorBoard logger of the main process."""
        if (
            trainer.sanity_checking
            or not trainer.is_global_zero
            or not getattr(pl_module, "writes_plans", False)
        ):
            return
        self._validations += 1
        boards = [logger.experiment for logger in trainer.loggers if isinstance(logger, TensorBoardLogger)]
        if not boards or self._validations % self.every_n_validations:
            return
        module: Any = pl_module
        dialogues = trainer.datamodule.held_out_turns(self.dialogues)  # type: ignore[attr-defined]
        for number, (turns, written) in enumerate(zip(dialogues, module.write_plans(dialogues), strict=True)):
            for board in boards:
                board.add_text(f"plans/{number}", as_markdown(turns, written), trainer.global_step)
                plans = [generated.plan for generated in written]
                board.add_figure(
                    f"plans/{number}", dag_figure(plans, f"step {trainer.global_step}"), trainer.global_step
                )


def as_markdown(turns: list[PlannedTurn], written: list[Generated]) -> str:
    """Question, plan as written and gold plan of each turn."""
    parts = []
    for number, (turn, generated) in enumerate(zip(turns, written, strict=True), start=1):
        lines = _lines(generated.plan) if generated.plan is not None else [f"({generated.error})"]
        parts.append(f"**{number}. {turn.question}**\n")
        parts.append("written:\n\n" + "\n".join(f"    {line}" for line in lines) + "\n")
        parts.append("gold:\n\n" + "\n".join(f"    {line}" for line in _lines(turn.plan)) + "\n")
    return "\n".join(parts)


def _lines(plan: TracePlan) -> list[str]:
    return linearise(plan).replace("[/TRACE]", "[/TRACE]\n").splitlines()
