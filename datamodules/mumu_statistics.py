"""Statistics of built dialogues, as in Table 6 and appendix A.5 of CMT-RAG.

In: dialogues. Out: plain values for the manifest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from datamodules.mumu_model import Dialogue


def statistics(dialogues: Sequence[Dialogue]) -> dict[str, Any]:
    """The row of Table 6 (min, max, mean per dialogue), turns by operator, and the share of GS turns.

    An original turn counts for the operator of the first later turn that depends on it, or for none.
    """

    def spread(values: list[int]) -> dict[str, float]:
        return {"min": min(values), "max": max(values), "mean": round(sum(values) / len(values), 2)}

    operators: Counter[str] = Counter(turn.operator for d in dialogues for turn in d.turns)
    modes: Counter[str] = Counter(mode for d in dialogues for mode in turn_modes(d))
    row: dict[str, Any] = {
        "dialogues": len(dialogues),
        "turns": spread([len(d.turns) for d in dialogues]),
        "sub_questions": spread([len(d.traces) for d in dialogues]),
        "cross_turn_edges": spread([d.cross_turn_edges() for d in dialogues]),
        "total_turns": sum(len(d.turns) for d in dialogues),
        "operators": dict(sorted(operators.items())),
    }
    if linked := modes["GS"] + modes["SQR"]:
        row["gs_share"] = round(modes["GS"] / linked, 4)
    return row


def turn_modes(dialogue: Dialogue) -> list[str]:
    """Per turn the synthesis mode that made it: "GS", "SQR", or "ORIG" for a question nothing depends on."""
    modes = [turn.operator.partition("_")[0] for turn in dialogue.turns]
    for n, turn in enumerate(dialogue.turns):
        if modes[n] == "ORIG":
            own = {trace.id for trace in turn.traces}
            for later in range(n + 1, len(modes)):
                if any(own & set(trace.deps) for trace in dialogue.turns[later].traces):
                    modes[n] = dialogue.turns[later].operator.partition("_")[0]
                    break
    return modes
