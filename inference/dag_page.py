"""A dialogue with its trace DAG and its evidence as one HTML page.

In:  a `Page`: turns of traces, the paragraphs they found, a title and a few facts. Plain data, any text.
Out: the page as a string: no network, no font, no library; it opens from a file. The same data give the same bytes.

Turns are columns, traces cards, dependencies arrows (CMT-RAG section 3.1). A click on a card shows what the trace
found, and marks what it needs and what builds on it. `inference.dag_layout` says where everything goes; the page's
script only answers clicks, from the data that the page carries as JSON, and never turns text into markup.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from importlib.resources import files
from string import Template

from inference.dag_layout import COLUMN, LINE, Edge, Layout, Node, layout, text_lines

MOST_LINES = 5  # of a sub-question on its card
MOST_HEADER_LINES = 7  # of a question above its column
MOST_ANSWER_LINES = 3
_CORNER = 5
_UNPRINTABLE = re.compile("[\x00\ud800-\udfff]")


@dataclass(frozen=True)
class PageTrace:
    """One trace; `[A3]` in `sub_question` and `keywords` stands for the answer of trace 3. `flags`: short marks."""

    id: int
    sub_question: str
    keywords: str
    deps: tuple[int, ...]
    answer: str
    paragraph_ids: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()


@dataclass(frozen=True)
class PageTurn:
    """One user question, its answer, and the traces between them. `labels`: how it came about."""

    question: str
    answer: str
    traces: tuple[PageTrace, ...]
    labels: tuple[str, ...] = ()


@dataclass(frozen=True)
class PageParagraph:
    id: str
    title: str
    text: str


@dataclass(frozen=True)
class Page:
    """All that a page shows; `facts` are (name, value) beside the title."""

    title: str
    turns: tuple[PageTurn, ...]
    paragraphs: tuple[PageParagraph, ...] = ()
    facts: tuple[tuple[str, str], ...] = ()


def render(page: Page) -> str:
    """The page as HTML. Encode it as UTF-8.

    Raises ValueError when an id is below 1 or used twice, or a dependency is not an earlier trace or named twice. A
    paragraph that `page` does not hold is shown by its id.
    """
    deps = _dependencies(page)
    header = 40 + LINE * max((_lines(turn.question, MOST_HEADER_LINES) for turn in page.turns), default=1)
    answer = 56 + LINE * max((_lines(turn.answer, MOST_ANSWER_LINES) for turn in page.turns), default=1)
    nodes = [
        [Node(t.id, t.deps, _lines(t.sub_question, MOST_LINES)) for t in turn.traces] for turn in page.turns
    ]
    placed = layout(nodes, header, answer)
    above = closure(deps)
    data = {"page": asdict(page), "above": above, "below": inverse(above)}
    script = _file("dag.js")
    return Template(_file("dag.html")).substitute(
        digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        style=_file("dag.css"),
        script=script,
        data=_script_json(data),
        title=_text(page.title),
        facts="".join(f"<li>{_text(name)} <b>{_text(value)}</b></li>" for name, value in page.facts),
        width=placed.width,
        height=placed.height,
        header=header,
        edges="\n".join(_edge(edge) for edge in placed.edges),
        turns="\n".join(_turn(page.turns[n], n, placed) for n in range(len(page.turns))),
    )


def closure(deps: Mapping[int, Collection[int]]) -> dict[int, list[int]]:
    """Trace -> everything it depends on, directly or not, sorted. Dependencies come before what needs them."""
    out: dict[int, list[int]] = {}
    for trace, direct in deps.items():
        found = set(direct)
        for dep in direct:
            found.update(out[dep])
        out[trace] = sorted(found)
    return out


def inverse(above: Mapping[int, Collection[int]]) -> dict[int, list[int]]:
    """Trace -> everything that depends on it: `closure` read backwards."""
    out: dict[int, list[int]] = {trace: [] for trace in above}
    for trace in sorted(above):
        for dep in above[trace]:
            out[dep].append(trace)
    return out


def _dependencies(page: Page) -> dict[int, tuple[int, ...]]:
    deps: dict[int, tuple[int, ...]] = {}
    for trace in (trace for turn in page.turns for trace in turn.traces):
        if trace.id < 1:
            raise ValueError(f"trace id {trace.id} is out of range; ids start at 1")
        if trace.id in deps:
            raise ValueError(f"trace {trace.id} appears twice; ids are unique in a dialogue")
        for n, dep in enumerate(trace.deps):
            if dep not in deps:
                raise ValueError(f"trace {trace.id} depends on {dep}, which is not an earlier trace")
            if dep in trace.deps[:n]:
                raise ValueError(f"trace {trace.id} depends on {dep} twice")
        deps[trace.id] = trace.deps
    return deps


def _turn(turn: PageTurn, n: int, placed: Layout) -> str:
    lines = _lines(turn.answer, MOST_ANSWER_LINES)
    labels = "".join(f"<span class=chip dir=auto>{_text(label)}</span>" for label in turn.labels)
    return "\n".join(
        [
            f'<section style="left:{placed.columns[n]}px;width:{COLUMN}px" aria-label="Turn {n + 1}">',
            f'<a class=question href="#T{n + 1}"><span class=row><b>Turn {n + 1}</b>{labels}</span>'
            f"<span class=text dir=auto>{_text(turn.question)}</span></a>",
            *(_card(trace, placed) for trace in turn.traces),
            f'<div class=answer style="top:{placed.bottoms[n] + 24}px"><span class=row><b>Answer</b></span>'
            f'<span class=text dir=auto style="-webkit-line-clamp:{lines}">{_text(turn.answer) or _NONE}</span></div>',
            "</section>",
        ]
    )


def _card(trace: PageTrace, placed: Layout) -> str:
    card = placed.cards[trace.id]
    flags = "".join(f"<span class=chip dir=auto>{_text(flag)}</span>" for flag in trace.flags)
    needs = " ".join(f"[A{dep}]" for dep in trace.deps)
    return (
        f'<a class=card id="trace-{trace.id}" href="#A{trace.id}" style="top:{card.y}px;height:{card.height}px">'
        f"<span class=row><b>[A{trace.id}]</b>{flags}</span>"
        f'<span class=text dir=auto style="-webkit-line-clamp:{_lines(trace.sub_question, MOST_LINES)}">'
        f"{_text(trace.sub_question)}</span>"
        + (f"<span class=needs>needs {needs}</span>" if needs else "")
        + f"<span class=found dir=auto>{_text(trace.answer) or _NONE}</span></a>"
    )


def _edge(edge: Edge) -> str:
    kind = "cross" if edge.cross else "inner"
    return (
        f'<g class="edge {kind}" data-from="{edge.source}" data-to="{edge.target}">'
        f'<path d="{_path(edge.points)}" marker-end="url(#{kind})"/>'
        f'<text x="{edge.label[0]}" y="{edge.label[1]}" text-anchor="{edge.anchor}">[A{edge.source}]</text></g>'
    )


def _path(points: tuple[tuple[int, int], ...]) -> str:
    """A polyline of right angles as SVG path data, its corners rounded; corners in line are left out."""
    turns = [
        point
        for before, point, after in zip(points, points[1:], points[2:], strict=False)
        if not (before[0] == point[0] == after[0] or before[1] == point[1] == after[1])
    ]
    points = (points[0], *turns, points[-1])
    parts = [f"M{points[0][0]} {points[0][1]}"]
    for before, (x, y), after in zip(points, points[1:], points[2:], strict=False):
        (ax, ay), (bx, by) = _towards((x, y), before), _towards((x, y), after)
        parts.append(f"L{ax} {ay}Q{x} {y} {bx} {by}")
    return "".join([*parts, f"L{points[-1][0]} {points[-1][1]}"])


def _towards(corner: tuple[int, int], other: tuple[int, int]) -> tuple[int, int]:
    """The point where the rounding of `corner` meets the line to `other`: a corner away, or half the line."""
    dx, dy = other[0] - corner[0], other[1] - corner[1]
    reach = min(_CORNER, (abs(dx) + abs(dy)) // 2)
    return corner[0] + reach * (dx > 0) - reach * (dx < 0), corner[1] + reach * (dy > 0) - reach * (dy < 0)


def _lines(text: str, most: int) -> int:
    return min(most, text_lines(text))


def _text(text: str) -> str:
    """Text for an element or a quoted attribute; what HTML or UTF-8 cannot carry becomes U+FFFD."""
    return html.escape(_UNPRINTABLE.sub("\ufffd", text))


def _script_json(data: object) -> str:
    """JSON that neither ends its script element nor holds what UTF-8 cannot carry; it parses back to `data`."""
    text = json.dumps(data, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
    return re.sub("[<>&\u2028\u2029\ud800-\udfff]", lambda match: f"\\u{ord(match[0]):04x}", text)


@cache
def _file(name: str) -> str:
    return (files("inference") / "templates" / name).read_text(encoding="utf-8")


_NONE = "<i>no answer</i>"
