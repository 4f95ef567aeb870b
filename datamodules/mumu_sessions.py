"""Sessions and short dialogues: linked turns grown from source graphs by the two operators.

In:  annotated graphs of one split and a seeded random generator.
Out: sessions of linked turns (`build_sessions`, for interleaving) and short dialogues of 3-7 turns (`build_short`).

A graph is used in at most `max_uses` dialogues of a split and never twice in one. Source: CMT-RAG, appendix A.2-A.3;
Table 6 for the numbers of turns and cross-turn edges.
"""

from __future__ import annotations

import math
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from datamodules.mumu_interleave import interleave
from datamodules.mumu_operators import (
    BridgeIndex,
    DraftTurn,
    Rejected,
    Session,
    gids_of,
    grow_by_relocation,
    grow_by_splicing,
    original,
    partial,
    traces_of,
)
from datamodules.mumu_text import Wording, topic_words
from datamodules.musique import SrcGraph

GS_SHARE = 0.7539  # share of Graph Splicing turns in the paper's stage-3 development split
PARTIAL_FIRST = 0.25
JOINED_SHARE = 0.6  # short dialogues made of two sessions; brings cross-turn edges near Table 6


class Neighbours:
    """Topic neighbours by shared vocabulary: titles and sub-questions, weighted by inverse document frequency."""

    def __init__(self, graphs: Sequence[SrcGraph], common: int = 100):
        self._graphs = graphs
        self._words = {g.gid: sorted(topic_words(g.nodes)) for g in graphs}
        postings: dict[str, list[int]] = defaultdict(list)
        for n, graph in enumerate(graphs):
            for word in self._words[graph.gid]:
                postings[word].append(n)
        self._postings = {w: p for w, p in postings.items() if 1 < len(p) <= common}
        self._cache: dict[str, list[SrcGraph]] = {}

    def of(self, graph: SrcGraph, limit: int = 24) -> list[SrcGraph]:
        """The nearest other graphs, best first; ties by order in the source."""
        if graph.gid not in self._cache:
            score: dict[int, float] = defaultdict(float)
            for word in self._words[graph.gid]:
                posting = self._postings.get(word, ())
                weight = math.log(len(self._graphs) / len(posting)) if posting else 0.0
                for n in posting:
                    score[n] += weight
            best = sorted(score.items(), key=lambda item: (-item[1], item[0]))[: limit + 1]
            self._cache[graph.gid] = [self._graphs[n] for n, _ in best if self._graphs[n].gid != graph.gid][
                :limit
            ]
        return self._cache[graph.gid]


@dataclass
class Pool:
    """The graphs of one split with their indexes, how often each was used, and the rejections counted so far."""

    graphs: Sequence[SrcGraph]
    wording: Wording
    max_uses: int
    mentions: bool = False
    index: BridgeIndex = field(init=False)
    neighbours: Neighbours = field(init=False)
    uses: Counter[str] = field(default_factory=Counter)
    rejections: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.index = BridgeIndex(self.graphs, self.mentions)
        self.neighbours = Neighbours(self.graphs)

    def available(self, graph: SrcGraph) -> bool:
        return self.uses[graph.gid] < self.max_uses

    def take(self, session: Session) -> Session:
        self.uses.update(gids_of(session))
        return session


def first_turn(graph: SrcGraph, pool: Pool, rng: random.Random) -> DraftTurn:
    """The whole source question, or with probability 0.25 its closure at a random intermediate node."""
    if rng.random() < PARTIAL_FIRST:
        try:
            return partial(graph, rng.randrange(graph.final), pool.wording)
        except Rejected as rejected:
            pool.rejections[f"gs/{rejected.rule}"] += 1
    return original(graph)


def grow(
    seed: DraftTurn,
    target: int,
    pool: Pool,
    rng: random.Random,
    order: Sequence[str],
    max_traces: int = 64,
    banned: frozenset[str] = frozenset(),
) -> Session:
    """Grow a session to `target` turns by the operators in `order` ("gs", "sqr"); shorter when nothing fits.

    banned: graphs that must not be used.
    """
    session: Session = (seed,)

    def available(graph: SrcGraph) -> bool:
        return graph.gid not in banned and pool.available(graph)

    while len(session) < target:
        grown = None
        for operator in order:
            if operator == "gs":
                grown = grow_by_splicing(session, pool.index, pool.wording, rng, available, pool.rejections)
            else:
                near = pool.neighbours.of(session[-1].graph)
                grown = grow_by_relocation(session, near, pool.wording, available, pool.rejections)
            if grown is not None:
                break
        if grown is None or len(traces_of(grown)) > max_traces:
            break
        session = grown
    return session


def seed_of(mode: str, graph: SrcGraph, pool: Pool, rng: random.Random) -> DraftTurn:
    return first_turn(graph, pool, rng) if mode == "gs" else original(graph)


def build_short(
    pool: Pool, count: int, rng: random.Random, max_traces: int, tick: Callable[[], None]
) -> list[list[DraftTurn]]:
    """Dialogues of 3-7 turns: one session, or two interleaved ones near in topic.

    GS dialogues come first, as many as the paper's share, because splices are scarce; SQR fills the rest.
    """
    dialogues: list[list[DraftTurn]] = []
    for order, wanted in ((("gs", "sqr"), round(GS_SHARE * count)), (("sqr", "gs"), count)):
        for graph in _seeds(pool, rng):
            if len(dialogues) >= wanted:
                break
            if not pool.available(graph):
                continue
            parts = _short_parts(graph, pool, rng, order, max_traces)
            first = parts[0]
            if order[0] == "gs" and not any(turn.operator == "GS_C" for turn in first):
                continue  # no splice: leave the graph to SQR
            if len(first) < 2 or sum(map(len, parts)) < 3:
                pool.rejections["short/too_few_turns"] += 1
                continue
            for part in parts:
                pool.take(part)
            dialogues.append([turn for _, turn in interleave(parts, rng)])
            tick()
    rng.shuffle(dialogues)
    return dialogues


def _short_parts(
    graph: SrcGraph, pool: Pool, rng: random.Random, order: Sequence[str], max_traces: int
) -> list[Session]:
    """One or two sessions with 3-7 turns together, where the source allows."""
    target = rng.choices((3, 4, 5, 6, 7), (46, 27, 15, 8, 4))[0]
    joined = rng.random() < JOINED_SHARE
    own = rng.randint(2, target - 1) if joined else target
    first = grow(seed_of(order[0], graph, pool, rng), own, pool, rng, order, max_traces)
    parts = [first]
    if len(first) >= 2 and len(first) < target:
        if extra := _companion(
            first, target - len(first), pool, rng, order, max_traces - len(traces_of(first))
        ):
            parts.append(extra)
    return parts


def _companion(
    first: Session, turns: int, pool: Pool, rng: random.Random, order: Sequence[str], max_traces: int
) -> Session | None:
    """A session of up to `turns` turns, near the first one, that shares no graph, sub-question or turn
    question with it."""
    gids = frozenset(gids_of(first))
    sids = {trace.node.sid for trace in traces_of(first)}
    questions = {turn.question for turn in first}
    for graph in pool.neighbours.of(first[-1].graph):
        if graph.gid in gids or not pool.available(graph) or any(node.sid in sids for node in graph.nodes):
            continue
        session = grow(original(graph), turns, pool, rng, order, max_traces, gids)
        for candidate in (session, (original(graph),)):
            clash = any(trace.node.sid in sids for trace in traces_of(candidate))
            if (
                not clash
                and not questions & {turn.question for turn in candidate}
                and len(traces_of(candidate)) <= max_traces
            ):
                return candidate
    return None


def _seeds(pool: Pool, rng: random.Random) -> Iterable[SrcGraph]:
    """Every graph once per allowed use, each round in a new order."""
    for _ in range(pool.max_uses):
        order = list(pool.graphs)
        rng.shuffle(order)
        yield from order


def build_sessions(pool: Pool, turns_needed: int, rng: random.Random) -> list[Session]:
    """Sessions of 2-5 turns: GS up to the paper's share of turns, then SQR (more of it where the source has
    few splices)."""
    sessions: list[Session] = []
    turns = 0
    for mode, wanted in (("gs", GS_SHARE * turns_needed), ("sqr", turns_needed)):
        for graph in _seeds(pool, rng):
            if turns >= wanted:
                break
            if not pool.available(graph):
                continue
            target = rng.choices((2, 3, 4, 5), (60, 25, 10, 5) if mode == "gs" else (70, 30, 0, 0))[0]
            session = grow(seed_of(mode, graph, pool, rng), target, pool, rng, (mode,))
            if len(session) < 2:
                pool.rejections[f"session/no_{mode}"] += 1
                continue
            sessions.append(pool.take(session))
            turns += len(session)
    rng.shuffle(sessions)
    return sessions
