"""A picture of the traces of a dialogue and the dependencies between them. CMT-RAG 3.2 (trace DAG), Figure 8.

In:  the plans of the turns, in order. Out: a matplotlib figure: a column per turn, a node per trace, an arrow from a
     dependency to the trace that uses it.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from inference.traces import TracePlan


def dag_figure(plans: Sequence[TracePlan | None], title: str = "") -> Figure:
    """Draw the plans; a turn whose plan did not parse is an empty column named so."""
    rows = max([len(plan.traces) for plan in plans if plan is not None] or [1])
    figure = Figure(figsize=(max(4.0, 3.2 * len(plans)), max(2.0, 1.1 * rows + 0.8)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    place = {}
    for column, plan in enumerate(plans):
        axes.text(
            column,
            0.6,
            f"turn {column + 1}" + (" (no plan)" if plan is None else ""),
            ha="center",
            color="#555555",
        )
        for row, trace in enumerate(plan.traces if plan is not None else ()):
            place[trace.id] = (column, -row)
            text = "\n".join(textwrap.wrap(f"{trace.id}  {trace.sub_question}", 34)[:3])
            box = {"boxstyle": "round", "facecolor": "#eef3fb", "edgecolor": "#4a6fa5"}
            axes.text(
                column, -row, text, ha="center", va="center", fontsize=7, bbox=box, zorder=2, parse_math=False
            )
    for plan in plans:
        for trace in plan.traces if plan is not None else ():
            for dep in trace.deps:
                if dep in place:
                    _arrow(axes, place[dep], place[trace.id])
    axes.set_xlim(-0.6, len(plans) - 0.4)
    axes.set_ylim(-rows + 0.4, 0.9)
    axes.axis("off")
    if title:
        axes.set_title(title, fontsize=9, parse_math=False)
    return figure


def _arrow(axes, start: tuple[float, float], end: tuple[float, float]) -> None:
    bend = 0.35 if start[0] == end[0] else 0.1
    style = {
        "arrowstyle": "-|>",
        "color": "#b5523b",
        "shrinkA": 14,
        "shrinkB": 14,
        "connectionstyle": f"arc3,rad={bend}",
    }
    axes.annotate("", xy=end, xytext=start, arrowprops=style, zorder=1)
