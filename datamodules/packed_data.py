"""What every data module of the trace generator shares: two lists of documents, served in packed batches.

In:  documents of a training and a development set (a subclass fills them in `setup`), batch settings.
Out: PackedLoader objects that know this process's place in the run, and the number of optimizer steps of an epoch.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass

from lightning.pytorch import LightningDataModule

from datamodules.packing import Document, PackedLoader
from inference.tokens import PlanTokenizer
from inference.traces import TracePlan

log = logging.getLogger("trace_memory.data")


@dataclass(frozen=True)
class PlannedTurn:
    """A user's question and the gold plan that answers it."""

    question: str
    plan: TracePlan


class PackedData(LightningDataModule):
    """Serves `train_documents` and `dev_documents`; `dev_turns` are the dialogues behind the latter, as text.

    Args:
        batch_size: dialogues in a batch of one process.
        val_batch_size: the same for validation (no gradient, so it can be larger).
        seed: order of the training dialogues, together with the epoch.
        max_row_tokens: split a packed batch into rows of at most this many tokens (null: one row).
    """

    def __init__(self, batch_size: int, val_batch_size: int, seed: int, max_row_tokens: int | None) -> None:
        super().__init__()
        check_positive(batch_size=batch_size, val_batch_size=val_batch_size, max_row_tokens=max_row_tokens)
        self.batch_size = batch_size
        self.val_batch_size = val_batch_size
        self.seed = seed
        self.max_row_tokens = max_row_tokens
        self.tokens: PlanTokenizer | None = None
        self.train_documents: list[Document] = []
        self.dev_documents: list[Document] = []
        self.dev_turns: list[list[PlannedTurn]] = []

    def train_dataloader(self) -> PackedLoader:
        """Training batches of this rank, shuffled by (seed, epoch)."""
        fill = self.trainer is not None and self.trainer.strategy.handles_gradient_accumulation
        return PackedLoader(
            self.train_documents, self.batch_size, self.seed,
            accumulate=self._accumulate, fill_last_window=fill, **self._place(),
        )  # fmt: skip

    def val_dataloader(self) -> PackedLoader:
        """Development batches of this rank, in file order."""
        return PackedLoader(
            self.dev_documents, self.val_batch_size, self.seed, shuffle=False, **self._place()
        )

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of one epoch: ceil(ceil(dialogues / (batch * processes)) / accumulate)."""
        batches = math.ceil(len(self.train_documents) / (self.batch_size * self._place()["world"]))
        return math.ceil(batches / self._accumulate)

    def held_out_turns(self, n: int) -> list[list[PlannedTurn]]:
        """`n` development dialogues spread evenly over the file, always the same ones."""
        return spread(self.dev_turns, n)

    @property
    def _accumulate(self) -> int:
        return self.trainer.accumulate_grad_batches if self.trainer else 1

    def _place(self) -> dict:
        trainer = self.trainer
        return {
            "rank": trainer.global_rank if trainer else 0,
            "world": trainer.world_size if trainer else 1,
            "max_row_tokens": self.max_row_tokens,
        }


def spread(items: list, limit: int | None) -> list:
    """At most `limit` items, evenly spaced, so that every part of a file is represented."""
    if limit is None or limit >= len(items):
        return items
    return [items[i * len(items) // limit] for i in range(limit)]


def check_positive(**settings: int | None) -> None:
    """ValueError naming the first setting of the data that is below 1 (null is no limit)."""
    for name, value in settings.items():
        if value is not None and value < 1:
            raise ValueError(f"data.{name} is {value}: it must be 1 or more")


def describe(documents: Sequence[Document]) -> str:
    """A line for the log: how many documents and tokens."""
    tokens = sum(len(document) for document in documents)
    plan = sum(document.plan_tokens for document in documents)
    return f"{len(documents):,} documents, {tokens:,} tokens, {plan:,} of them plan tokens with loss"
