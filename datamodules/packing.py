"""Packed rows and the order in which dialogues are trained on.

In:  documents (token ids and a loss weight per token), a batch size, a seed, and the place of this process in the run.
Out: batches whose documents lie end to end in one row (`seq_idx` tells them apart, so nothing is padded), with the
     positions that carry loss and the weight of the whole accumulation window. CMT-RAG B.3 (batch, accumulation).

The order is a permutation of the documents that depends on (seed, epoch) alone. Rank r of W takes every W-th document
of it, so the documents of one optimizer step are the same for every split into ranks, accumulation and batch size with
the same product. A loader remembers its place: it is sized and stateful, which is what Lightning resumes exactly.

Legend: B rows, L tokens of a row, T tokens that carry loss.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Document:
    """One dialogue (or plain text) as tokens.

    Attributes:
        ids: token ids, int32 (L,).
        weights: weight of each token in the loss as a target, float32 (L,); the first token is never a target.
        plan_tokens: how many of the tokens that carry loss belong to a plan.
    """

    ids: np.ndarray
    weights: np.ndarray
    plan_tokens: int

    @classmethod
    def of(cls, ids: Sequence[int], weights: Sequence[float], plan_tokens: int) -> Document:
        """Build one from plain lists. ValueError where the lists differ in length or hold fewer than two tokens."""
        if len(ids) != len(weights) or len(ids) < 2:
            raise ValueError(
                f"a document needs at least two tokens and a weight for each: {len(ids)}, {len(weights)}"
            )
        kept = np.asarray(weights, dtype=np.float32)
        kept[0] = 0.0
        return cls(np.asarray(ids, dtype=np.int32), kept, plan_tokens)

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def weight(self) -> float:
        """Sum of the loss weights: the document's share of a window."""
        return float(self.weights.sum(dtype=np.float64))


@dataclass
class PackedBatch:
    """What a training step reads.

    Attributes:
        input_ids_BL: int64. One row unless `max_row_tokens` splits it; then rows are right-padded.
        seq_idx_BL: int32, the number of the document within its row; pads count as a document of their own.
        positions_T: int64 indices into the flattened (B*L) rows of the hidden states that predict `targets_T`.
        targets_T: int64 token ids.
        weights_T: float32 loss weights.
        window_plan_tokens: sum of the weights over the accumulation window of all ranks this batch belongs to.
        documents: how many documents it holds (0 for the zero-weight copy that keeps a rank busy).
        tokens: tokens that are not padding.
        plan_tokens: of those, the plan tokens that carry loss.
    """

    input_ids_BL: Tensor
    seq_idx_BL: Tensor
    positions_T: Tensor
    targets_T: Tensor
    weights_T: Tensor
    window_plan_tokens: float
    documents: int
    tokens: int
    plan_tokens: int


def pack(
    documents: Sequence[Document],
    window_plan_tokens: float,
    *,
    max_row_tokens: int | None = None,
    counts: bool = True,
) -> PackedBatch:
    """Lay documents end to end.

    Args:
        documents: at least one.
        window_plan_tokens: stored in the batch, see PackedBatch.
        max_row_tokens: start a new row rather than exceed this many tokens in one (a longer document has its own row).
        counts: False makes a zero-weight copy, for a rank that has no document left.
    """
    rows = _rows(documents, max_row_tokens)
    length = max(sum(len(document) for document in row) for row in rows)
    ids = np.zeros((len(rows), length), dtype=np.int64)
    seq_idx = np.zeros((len(rows), length), dtype=np.int32)
    positions, targets, weights = [], [], []
    for r, row in enumerate(rows):
        start = 0
        for number, document in enumerate(row):
            end = start + len(document)
            ids[r, start:end] = document.ids
            seq_idx[r, start:end] = number
            wanted = np.flatnonzero(document.weights)
            positions.append(r * length + start + wanted - 1)
            targets.append(document.ids[wanted])
            weights.append(document.weights[wanted])
            start = end
        seq_idx[r, start:] = len(row)
    weight = np.concatenate(weights)
    return PackedBatch(
        input_ids_BL=torch.from_numpy(ids),
        seq_idx_BL=torch.from_numpy(seq_idx),
        positions_T=torch.from_numpy(np.concatenate(positions).astype(np.int64)),
        targets_T=torch.from_numpy(np.concatenate(targets).astype(np.int64)),
        weights_T=torch.from_numpy(weight if counts else np.zeros_like(weight)),
        window_plan_tokens=window_plan_tokens,
        documents=len(documents) if counts else 0,
        tokens=sum(len(document) for document in documents),
        plan_tokens=sum(document.plan_tokens for document in documents) if counts else 0,
    )


def _rows(documents: Sequence[Document], max_row_tokens: int | None) -> list[list[Document]]:
    """Longest first into the first row with room, so that rows end up about equally long."""
    if max_row_tokens is None or sum(len(document) for document in documents) <= max_row_tokens:
        return [list(documents)]
    rows: list[list[Document]] = []
    room: list[int] = []
    for document in sorted(documents, key=len, reverse=True):
        fits = [i for i, free in enumerate(room) if free >= len(document)]
        if fits:
            rows[fits[0]].append(document)
            room[fits[0]] -= len(document)
        else:
            rows.append([document])
            room.append(max_row_tokens - len(document))
    return rows


class PackedLoader:
    """A sized, stateful, epoch-aware iterable of PackedBatch for one rank.

    `len()` batches an epoch on every rank; where the last one has no document left for a rank, that rank gets a
    zero-weight copy of another, so all ranks take part in every step.

    Args:
        documents: all documents of the data set, the same on every rank.
        batch_size: documents in a batch of one rank.
        seed: with the epoch, the only source of the order.
        shuffle: False keeps the given order (validation).
        rank, world: this process and the number of processes.
        accumulate: batches per optimizer step of a rank.
        max_row_tokens: see `pack`.
        fill_last_window: end the epoch on a whole accumulation window, filled up with zero-weight copies. Needed where
            the strategy accumulates by itself and does not step on a partial window (DeepSpeed).
    """

    def __init__(
        self,
        documents: Sequence[Document],
        batch_size: int,
        seed: int = 42,
        *,
        shuffle: bool = True,
        rank: int = 0,
        world: int = 1,
        accumulate: int = 1,
        max_row_tokens: int | None = None,
        fill_last_window: bool = False,
    ) -> None:
        if batch_size < 1 or accumulate < 1 or not 0 <= rank < world:
            raise ValueError(
                f"batch_size {batch_size}, accumulate {accumulate}, rank {rank} of {world}: out of range"
            )
        if not documents:
            raise ValueError("there are no documents to load: the data set is empty after its limits")
        self.documents = documents
        self.batch_size = batch_size
        self.seed = seed
        self.shuffle = shuffle
        self.rank, self.world = rank, world
        self.accumulate = accumulate
        self.max_row_tokens = max_row_tokens
        self.fill_last_window = fill_last_window
        self._spare = min(documents, key=len)
        self.epoch = 0
        self.next_batch = 0

    batch_sampler = None  # Lightning asks every loader that has a `sampler` for this one too

    @property
    def sampler(self) -> PackedLoader:
        """Lightning calls `set_epoch` on a loader's sampler at the start of each epoch; the loader is its own."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Name the epoch. A new one starts at its first batch; the one a loaded state stands in keeps its place."""
        if epoch != self.epoch:
            self.epoch, self.next_batch = epoch, 0

    def __len__(self) -> int:
        batches = math.ceil(len(self.documents) / (self.batch_size * self.world))
        return math.ceil(batches / self.accumulate) * self.accumulate if self.fill_last_window else batches

    def order(self, epoch: int) -> list[int]:
        """Indices of all documents in the order of this epoch, over all ranks."""
        order = list(range(len(self.documents)))
        if self.shuffle:
            random.Random(f"{self.seed}/{epoch}").shuffle(order)
        return order

    def window_weight(self, order: Sequence[int], batch: int) -> float:
        """Weight sum of the accumulation window that holds this batch, over all ranks (the last may be partial)."""
        step = self.batch_size * self.world * self.accumulate
        first = batch // self.accumulate * step
        return sum(self.documents[i].weight for i in order[first : first + step])

    def __iter__(self) -> Iterator[PackedBatch]:
        if self.next_batch >= len(self):  # the epoch was read to its end and not named anew: read it again
            self.next_batch = 0
        epoch, order = self.epoch, self.order(self.epoch)
        mine = order[self.rank :: self.world]
        while self.epoch == epoch and self.next_batch < len(self):
            batch = self.next_batch
            self.next_batch += 1
            chosen = mine[batch * self.batch_size : (batch + 1) * self.batch_size]
            documents = [self.documents[i] for i in chosen] or [self._spare]
            weight = self.window_weight(order, batch)
            yield pack(documents, weight, max_row_tokens=self.max_row_tokens, counts=bool(chosen))

    def state_dict(self) -> dict[str, Any]:
        """Where the loader stands, and what the order depends on (plain types only)."""
        return {"epoch": self.epoch, "next_batch": self.next_batch, "order": self._order_facts()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict()`. ValueError where data or batching differ, because the order would too."""
        facts = self._order_facts()
        changed = [f"{name} {state['order'].get(name)} -> {facts[name]}" for name in facts
                   if state["order"].get(name) != facts[name]]  # fmt: skip
        if changed:
            raise ValueError(
                "the checkpoint was made with other data or batching, so its place in the order means nothing here: "
                f"{', '.join(changed)}. Resume with the run's own config.yaml, or start anew from its weights with "
                "--model.init_from"
            )
        self.epoch, self.next_batch = int(state["epoch"]), int(state["next_batch"])

    def _order_facts(self) -> dict[str, int]:
        return {
            "seed": self.seed,
            "documents": len(self.documents),
            "tokens": sum(len(document) for document in self.documents),
            "batch_size": self.batch_size,
            "processes": self.world,
            "accumulate": self.accumulate,
        }
