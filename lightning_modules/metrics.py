"""Held-out measurements of a trace generator: loss over the development set, and plans written greedily.

In:  per-token losses with weights; dialogues with gold plans and a generator.
Out: sum of nll / sum of weights over all processes; (predicted, gold) plan pairs for `inference.metrics`.
CMT-RAG B.3 (checkpoints are selected by validation loss); formats.md "metrics.json".
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torchmetrics import Metric

from datamodules.packed_data import PlannedTurn
from inference.generator import Generated, TraceGenerator
from inference.metrics import renumber
from inference.traces import TracePlan

Item = TypeVar("Item")
PlanPair = tuple[TracePlan | None, TracePlan]


class TokenLoss(Metric):
    """Weighted mean of per-token losses over any number of batches and processes, summed in double precision."""

    full_state_update = False
    total: Tensor
    weight: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("weight", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, nll_T: Tensor, weights_T: Tensor) -> None:
        """Add tokens."""
        self.total += (nll_T.double() * weights_T.double()).sum()
        self.weight += weights_T.double().sum()

    def compute(self) -> Tensor:
        """sum(nll * weight) / sum(weight), fp32."""
        return (self.total / self.weight).float()


def write_plans(
    generator: TraceGenerator,
    dialogues: Sequence[Sequence[PlannedTurn]],
    *,
    constrained: bool,
    max_new_tokens: int,
    batch: int = 16,
) -> list[list[Generated]]:
    """Plans of every turn, greedily and free-running: each turn continues from the plans the generator wrote itself.

    Dialogues run side by side, `batch` at a time; one that has no turn left leaves the batch.
    """
    written: list[list[Generated]] = [[] for _ in dialogues]
    by_length = sorted(range(len(dialogues)), key=lambda i: -len(dialogues[i]))
    for start in range(0, len(by_length), batch):
        rows = by_length[start : start + batch]
        sessions = generator.start(len(rows))
        for turn in range(len(dialogues[rows[0]])):
            live = [row for row in rows if len(dialogues[row]) > turn]
            if len(live) < len(rows):
                rows, sessions = live, sessions.select(list(range(len(live))))
            questions = [dialogues[row][turn].question for row in rows]
            plans = generator.generate(
                sessions, questions, constrained=constrained, temperature=0.0, max_new_tokens=max_new_tokens
            )
            for row, plan in zip(rows, plans, strict=True):
                written[row].append(plan)
    return written


def plan_pairs(
    written: Iterable[Sequence[Generated]], dialogues: Iterable[Sequence[PlannedTurn]]
) -> list[PlanPair]:
    """(plan as written, gold plan) of every turn, numbered alike; None where the written one does not parse."""
    return [
        pair
        for plans, turns in zip(written, dialogues, strict=True)
        for pair in renumber([p.plan if p.valid else None for p in plans], [turn.plan for turn in turns])
    ]


def gather(mine: list[Item]) -> list[Item]:
    """The items of all processes on every process, by rank."""
    if not (dist.is_available() and dist.is_initialized()):
        return mine
    parts: list[list[Item]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(parts, mine)
    return [item for part in parts for item in part]
