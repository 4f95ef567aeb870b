"""Which states of earlier turns a session keeps: a fork or an undo starts from one of them.

In:  the size of each kept state by turn, and a byte budget. Out: the turns whose states go.
CMT-RAG 3.4 and C.3 carry only the newest state; earlier ones are kept so that a branch needs no replay.
"""

from __future__ import annotations

from collections.abc import Mapping

STATE_BUDGET = 256 * 2**20
"""Bytes of states per session. A state of mamba2-tiny takes 0.56 MB, one of Mamba-2 2.7B 172 MB."""


def surplus_states(sizes: Mapping[int, int], budget: int = STATE_BUDGET) -> list[int]:
    """Turns whose states are to be dropped, ascending, so that the rest takes at most `budget` bytes.

    The newest two always stay, whatever their size: one to go on from, one for an undo. Among the others that state
    goes whose neighbours lie closest together (the oldest of equals; turn 0 is a neighbour that costs nothing), so
    that those that stay are spread over the whole dialogue and any turn is few turns of replay away.
    """
    kept = sorted(sizes)
    total, dropped = sum(sizes.values()), []
    while total > budget and len(kept) > 2:
        around = [0, *kept]
        at = min(range(1, len(around) - 2), key=lambda i: around[i + 1] - around[i - 1])
        total -= sizes[around[at]]
        dropped.append(around[at])
        kept.remove(around[at])
    return sorted(dropped)
