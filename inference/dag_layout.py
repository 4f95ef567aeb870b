"""Where the cards and the edges of a trace DAG go on the page.

In:  the turns' traces as `Node`s (id, dependencies, lines of text), turn by turn, each after what it depends on.
Out: a `Layout`: cards in one column per turn, edges as polylines that never cross a card, all in CSS pixels.

An edge between neighbours of one column is a straight arrow. Any other leaves its card for the gutter before the next
column (within a turn: before its own), turns there, and enters its target from the left. An edge that skips whole
columns rises to a lane above all cards. Edges of one source share their way, so they use one track per gutter and one
lane; tracks and lanes are given out first come, first served, where no earlier line is in the way.
"""

from __future__ import annotations

import unicodedata
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

COLUMN = 272  # width of a card
CHARACTERS = 33  # fit on one of its lines, in the widest of the usual fonts
LINE = 18
GAP = 40  # between two cards of a column: room for an arrow and its label
STEP = 8  # heights and ports are multiples of this, exits lie halfway between
TRACK = 7  # between two lines side by side
LABEL = 54  # room for a label and an arrowhead left of a card
MARGIN = 16


@dataclass(frozen=True)
class Node:
    """One trace: its id, the ids it depends on, and how many lines of text its card shows."""

    id: int
    deps: tuple[int, ...]
    lines: int


@dataclass(frozen=True)
class Card:
    """A rectangle: left, top, width, height."""

    x: int
    y: int
    width: int
    height: int


@dataclass(frozen=True)
class Edge:
    """From the border of the card `source` to that of `target`; the label starts or ends (`anchor`) at `label`."""

    source: int
    target: int
    cross: bool
    points: tuple[tuple[int, int], ...]
    label: tuple[int, int]
    anchor: str


@dataclass(frozen=True)
class Layout:
    """`columns`: left of each turn; `bottoms`: where its cards end; `cards`: by trace id."""

    width: int
    height: int
    columns: tuple[int, ...]
    bottoms: tuple[int, ...]
    cards: dict[int, Card]
    edges: tuple[Edge, ...]


def text_lines(text: str, characters: int = CHARACTERS) -> int:
    """Lines that `text` takes when wrapped at spaces; a longer word is broken, a wide character counts twice."""
    lines, used = 1, 0
    for word in text.split():
        width = sum(1 + (unicodedata.east_asian_width(c) in "WF") for c in word)
        if used and used + 1 + width <= characters:
            used += 1 + width
            continue
        lines += used > 0
        lines += max(0, width - 1) // characters
        used = max(0, width - 1) % characters + 1
    return lines


def layout(turns: Sequence[Sequence[Node]], top: int, bottom: int = 0) -> Layout:
    """Place `turns` below `top` pixels of header, leaving `bottom` pixels below the last card of a column.

    Every dependency has to be a node placed before its own; ids are unique (`inference.dag_page` checks both).
    """
    column_of = {node.id: c for c, turn in enumerate(turns) for node in turn}
    row_of = {node.id: r for turn in turns for r, node in enumerate(turn)}
    pairs = [(dep, node.id) for turn in turns for node in turn for dep in node.deps]

    def straight(source: int, target: int) -> bool:
        return column_of[source] == column_of[target] and row_of[source] + 1 == row_of[target]

    routed = [pair for pair in pairs if not straight(*pair)]
    reach: dict[int, int] = {}  # source -> last gutter its lane has to reach
    for source, target in routed:
        if column_of[target] > column_of[source] + 1:
            reach[source] = max(reach.get(source, 0), column_of[target])
    lanes = _pack({source: (column_of[source] + 1, last) for source, last in reach.items()})
    lane_count = max(lanes.values(), default=-1) + 1
    lane_y = {source: top + STEP + TRACK * (lane_count - lane) for source, lane in lanes.items()}

    y_of, height_of, ports, exits, bottoms = _rows(
        turns, routed, column_of, top + 2 * STEP + TRACK * lane_count
    )

    # What each source's vertical line in each gutter spans; gutter c lies left of column c.
    spans: dict[int, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for source, target in routed:
        here, there = column_of[source], column_of[target]
        if there <= here + 1:
            spans[there][source] += [exits[source, here == there], ports[source, target]]
        else:
            spans[here + 1][source] += [exits[source, False], lane_y[source]]
            spans[there][source] += [lane_y[source], ports[source, target]]
    columns: list[int] = []
    tracks: dict[tuple[int, int], int] = {}  # (gutter, source) -> x
    x = MARGIN
    for c in range(len(turns)):
        packed = _pack({source: (min(ys) - STEP, max(ys) + STEP) for source, ys in spans[c].items()})
        tracks |= {(c, source): x + TRACK * (1 + track) for source, track in packed.items()}
        x += TRACK * (1 + max(packed.values(), default=-1) + 1) + (LABEL if packed else MARGIN)
        columns.append(x)
        x += COLUMN

    cards = {i: Card(columns[c], y_of[i], COLUMN, height_of[i]) for i, c in column_of.items()}
    edges = []
    for source, target in pairs:
        here, there, card = column_of[source], column_of[target], cards[target]
        if straight(source, target):
            middle, start = card.x + COLUMN // 2, y_of[source] + height_of[source]
            edges.append(Edge(source, target, False, ((middle, start), (middle, card.y)),
                              (middle + 7, start + GAP // 2 + 4), "start"))  # fmt: skip
            continue
        end = ports[source, target]
        leave = exits[source, here == there]
        points = [(columns[here] + (0 if here == there else COLUMN), leave)]
        if there > here + 1:
            rise, lane = tracks[here + 1, source], lane_y[source]
            points += [(rise, leave), (rise, lane), (tracks[there, source], lane)]
        else:
            points.append((tracks[there, source], leave))
        points += [(tracks[there, source], end), (card.x, end)]
        edges.append(Edge(source, target, here != there, tuple(points), (card.x - 11, end - 6), "end"))
    height = max(bottoms, default=top) + bottom + MARGIN
    return Layout(x + MARGIN, height, tuple(columns), tuple(bottoms), cards, tuple(edges))


def _rows(
    turns: Sequence[Sequence[Node]], routed: list[tuple[int, int]], column_of: dict[int, int], first: int
) -> tuple[
    dict[int, int], dict[int, int], dict[tuple[int, int], int], dict[tuple[int, bool], int], list[int]
]:
    """Top and height of each card, the y at which edges enter and leave, and where each column ends.

    Edges enter on the left (`ports[source, target]`), and leave on the right (`exits[source, False]`) or, within the
    turn, on the left below all that enter (`exits[source, True]`).
    """
    into: dict[int, list[int]] = defaultdict(list)
    inner = {source for source, target in routed if column_of[source] == column_of[target]}
    for source, target in routed:
        into[target].append(source)
    y_of: dict[int, int] = {}
    height_of: dict[int, int] = {}
    ports: dict[tuple[int, int], int] = {}
    exits: dict[tuple[int, bool], int] = {}
    bottoms = []
    for turn in turns:
        y = -(-first // STEP) * STEP
        for row, node in enumerate(turn):
            y += GAP if row else 0
            doors = len(into[node.id]) + (node.id in inner)
            height = -(-max(60 + LINE * node.lines, 2 * STEP * (doors + 1)) // STEP) * STEP
            y_of[node.id], height_of[node.id] = y, height
            spread = height // (doors + 1) // STEP * STEP
            for n, source in enumerate(sorted(into[node.id])):
                ports[source, node.id] = y + spread * (n + 1)
            exits[node.id, True] = y + spread * doors
            exits[node.id, False] = y + height // 2 // STEP * STEP + STEP // 2
            y += height
        bottoms.append(y)
    return y_of, height_of, ports, exits, bottoms


def _pack(spans: dict[int, tuple[int, int]]) -> dict[int, int]:
    """Give every closed interval the lowest number that no overlapping interval has; short ones choose first."""
    rows: list[list[tuple[int, int]]] = []
    out = {}
    for key, (low, high) in sorted(
        spans.items(), key=lambda item: (item[1][1] - item[1][0], item[1], item[0])
    ):
        free = (n for n, row in enumerate(rows) if all(high < a or b < low for a, b in row))
        number = next(free, len(rows))
        if number == len(rows):
            rows.append([])
        rows[number].append((low, high))
        out[key] = number
    return out
