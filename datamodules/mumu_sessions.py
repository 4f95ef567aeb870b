"""Sessions and their interleaving: from source graphs to numbered dialogues.

In:  annotated graphs of one split and a seeded random generator.
Out: sessions (2-7 linked turns grown by the two operators), and dialogues made by interleaving sessions under an ambiguity guard
     and numbering all traces 1..K.

A graph is used in at most `max_uses` dialogues of a split and never twice in one. Source: CMT-RAG, appendix A.2-A.3
(long and ultra-long dialogues interleave synthesised sessions and remap identifiers).
"""

from __future__ import annotations

import math
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from datamodules.mumu_model import Trace, Turn
from datamodules.mumu_operators import (
    BridgeIndex,
    DraftTurn,
    Key,
    Rejected,
    Session,
    grow_by_relocation,
    grow_by_splicing,
    original,
    partial,
    traces_of,
)
from datamodules.mumu_relations import could_denote
from datamodules.mumu_text import Wording, content_words, keywords
from datamodules.musique import REFERENCE, SrcGraph

GS_SHARE = 0.7539  # share of Graph Splicing turns in the paper's stage-3 development split
PARTIAL_FIRST = 0.25


class Neighbours:
    """Topic neighbours by shared vocabulary: titles and sub-questions, weighted by inverse document frequency."""

    def __init__(self, graphs: Sequence[SrcGraph], common: int = 100):
        self._graphs = graphs
        self._words = {g.gid: sorted(set(_topic_words(g))) for g in graphs}
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


def _topic_words(graph: SrcGraph) -> Iterable[str]:
    for node in graph.nodes:
        yield from content_words(node.title)
        yield from content_words(node.text)


@dataclass
class Pool:
    """The graphs of one split with their indexes, how often each was used, and the rejections counted so far."""

    graphs: Sequence[SrcGraph]
    wording: Wording
    max_uses: int
    index: BridgeIndex = field(init=False)
    neighbours: Neighbours = field(init=False)
    uses: Counter[str] = field(default_factory=Counter)
    rejections: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.index = BridgeIndex(self.graphs)
        self.neighbours = Neighbours(self.graphs)

    def available(self, graph: SrcGraph) -> bool:
        return self.uses[graph.gid] < self.max_uses

    def take(self, session: Session) -> Session:
        self.uses.update(gids_of(session))
        return session


def gids_of(session: Iterable[DraftTurn]) -> list[str]:
    """The distinct source graphs of a session, in order of appearance."""
    return list(dict.fromkeys(trace.graph.gid for trace in traces_of(session)))


def first_turn(graph: SrcGraph, pool: Pool, rng: random.Random) -> DraftTurn:
    """The whole source question, or with probability 0.25 its closure at a random intermediate node."""
    if rng.random() < PARTIAL_FIRST:
        try:
            return partial(graph, rng.randrange(graph.final), pool.wording)
        except Rejected as rejected:
            pool.rejections[f"gs/{rejected.rule}"] += 1
    return original(graph)


def grow(
    seed: DraftTurn, target: int, pool: Pool, rng: random.Random, order: Sequence[str], max_traces: int
) -> Session:
    """Grow a session to `target` turns by the operators in `order` ("gs", "sqr"); shorter when nothing fits."""
    session: Session = (seed,)
    while len(session) < target:
        grown = None
        for operator in order:
            if operator == "gs":
                grown = grow_by_splicing(
                    session, pool.index, pool.wording, rng, pool.available, pool.rejections
                )
            else:
                near = pool.neighbours.of(session[-1].graph)
                grown = grow_by_relocation(session, near, pool.wording, pool.available, pool.rejections)
            if grown is not None:
                break
        if grown is None or len(traces_of(grown)) > max_traces:
            break
        session = grown
    return session


def seed_of(mode: str, graph: SrcGraph, pool: Pool, rng: random.Random) -> DraftTurn:
    return first_turn(graph, pool, rng) if mode == "gs" else original(graph)


def mode_turns(session: Session) -> Counter[str]:
    """Turns by synthesis mode: a first turn left as it was counts for the operator of the turn after it."""
    modes = [turn.operator.partition("_")[0] for turn in session]
    counted: Counter[str] = Counter()
    for n, mode in enumerate(modes):
        if mode == "ORIG":
            mode = modes[n + 1] if n + 1 < len(modes) else "ORIG"
        counted[mode] += 1
    return counted


def interleave(sessions: Sequence[Session], rng: random.Random) -> list[tuple[int, DraftTurn]]:
    """Mix sessions in blocks of 1-3 turns, order inside each kept; returns (session number, turn).

    Guard: between a trace that a later phrase stands for and the turn that says it, no other session introduces a trace the
    phrase could mean. A turn is emitted only if some order of finishing the open sessions remains, so this never gets stuck.
    """
    at = [0] * len(sessions)
    opened = [_openings(session) for session in sessions]
    types = [[frozenset(t.node.type for t in turn.traces) for turn in session] for session in sessions]

    def waiting(n: int, position: int) -> frozenset[str]:
        return opened[n][position]

    def clash(kinds: frozenset[str], open_types: frozenset[str]) -> bool:
        return any(could_denote(wanted, kind) for wanted in open_types for kind in kinds)

    def allowed(n: int) -> bool:
        turn = types[n][at[n]]
        if any(clash(turn, waiting(m, at[m])) for m in range(len(sessions)) if m != n):
            return False
        after = {m: at[m] + (m == n) for m in range(len(sessions))}
        active = [m for m in after if waiting(m, after[m])]
        while active:
            for m in active:
                rest = frozenset().union(*types[m][after[m] :])
                if not any(clash(rest, waiting(o, after[o])) for o in active if o != m):
                    active.remove(m)
                    break
            else:
                return False
        return True

    out: list[tuple[int, DraftTurn]] = []
    while live := [n for n in range(len(sessions)) if at[n] < len(sessions[n])]:
        rng.shuffle(live)
        n = next(m for m in live if allowed(m))
        for _ in range(rng.randint(1, 3)):
            if at[n] == len(sessions[n]) or not allowed(n):
                break
            out.append((n, sessions[n][at[n]]))
            at[n] += 1
    return out


def _openings(session: Session) -> list[frozenset[str]]:
    """For each position p: the types of traces in turns before p that a phrase in turn p or later stands for."""
    home = {trace.key: n for n, turn in enumerate(session) for trace in turn.traces}
    kind = {trace.key: trace.node.type for trace in traces_of(session)}
    out = []
    for p in range(len(session) + 1):
        keys = [turn.antecedent for turn in session[p:] if turn.antecedent is not None]
        out.append(frozenset(kind[key] for key in keys if home[key] < p))
    return out


def finalise(turns: Sequence[DraftTurn], realiser: str = "template") -> tuple[Turn, ...]:
    """Number the traces 1..K in order and write references as `[A_k]`."""
    ids: dict[Key, int] = {}
    out = []
    for t, turn in enumerate(turns, 1):
        traces = []
        for draft in turn.traces:
            ids[draft.key] = len(ids) + 1
            named = {ref + 1: ids[key] for ref, key in zip(draft.node.refs, draft.deps, strict=True)}
            text = REFERENCE.sub(lambda m, named=named: f"[A{named[int(m.group(1))]}]", draft.node.text)
            traces.append(
                Trace(
                    ids[draft.key],
                    text,
                    keywords(text),
                    tuple(sorted(set(named.values()))),
                    (draft.node.pid,) if draft.node.pid else (),
                    draft.node.answer,
                    draft.node.type,
                    draft.key,
                )
            )
        how = "original" if turn.operator == "ORIG" else realiser
        out.append(
            Turn(
                t,
                turn.question,
                turn.answer,
                turn.aliases,
                turn.operator,
                how,
                turn.phrase,
                False,
                tuple(traces),
            )
        )
    return tuple(out)


def build_short(
    pool: Pool, count: int, rng: random.Random, max_traces: int, tick: Callable[[], None]
) -> list[list[DraftTurn]]:
    """Dialogues of 3-7 turns: a session grown by GS (or SQR), filled up by the other operator, then by a second session."""
    dialogues: list[list[DraftTurn]] = []
    for graph in _seeds(pool, rng):
        if len(dialogues) == count:
            break
        if not pool.available(graph):
            continue
        target = rng.choices((3, 4, 5, 6, 7), (46, 27, 15, 8, 4))[0]
        order = ("gs", "sqr") if rng.random() < GS_SHARE else ("sqr", "gs")
        session = grow(seed_of(order[0], graph, pool, rng), target, pool, rng, order, max_traces)
        parts = [session]
        while sum(map(len, parts)) < 3 and len(session) > 1:
            extra = _companion(parts, pool)
            if extra is None:
                break
            parts.append(extra)
        if len(session) < 2 or sum(map(len, parts)) < 3:
            pool.rejections["short/too_few_turns"] += 1
            continue
        for part in parts:
            pool.take(part)
        dialogues.append([turn for _, turn in interleave(parts, rng)])
        tick()
    return dialogues


def _companion(parts: Sequence[Session], pool: Pool) -> Session | None:
    """A source question near the first session that shares no graph, sub-question or known answer with it."""
    gids = {gid for part in parts for gid in gids_of(part)}
    sids = {trace.node.sid for part in parts for trace in traces_of(part)}
    questions = {turn.question for part in parts for turn in part}
    for graph in pool.neighbours.of(parts[0][-1].graph):
        fresh = graph.gid not in gids and graph.question not in questions
        if fresh and pool.available(graph) and not any(node.sid in sids for node in graph.nodes):
            return (original(graph),)
    return None


def _seeds(pool: Pool, rng: random.Random) -> Iterable[SrcGraph]:
    """Every graph once per allowed use, each round in a new order."""
    for _ in range(pool.max_uses):
        order = list(pool.graphs)
        rng.shuffle(order)
        yield from order


def build_sessions(
    pool: Pool, turns_needed: int, rng: random.Random, tick: Callable[[int], None]
) -> list[Session]:
    """Sessions of 2-7 turns with the paper's share of GS turns where the source allows it, more SQR where it does not."""
    sessions: list[Session] = []
    have: Counter[str] = Counter()
    for graph in _seeds(pool, rng):
        if sum(have.values()) >= turns_needed:
            break
        if not pool.available(graph):
            continue
        behind = have["GS"] <= GS_SHARE * (sum(have.values()) + 1)
        mode = "gs" if behind else "sqr"
        target = (
            rng.choices((2, 3, 4, 5, 6, 7), (20, 30, 22, 14, 9, 5))[0]
            if mode == "gs"
            else rng.choice((2, 2, 3))
        )
        session = grow(seed_of(mode, graph, pool, rng), target, pool, rng, (mode,), 64)
        if len(session) < 2 and mode == "gs":
            session = grow(original(graph), rng.choice((2, 2, 3)), pool, rng, ("sqr",), 64)
        if len(session) < 2:
            pool.rejections["session/too_few_turns"] += 1
            continue
        sessions.append(pool.take(session))
        have.update(mode_turns(session))
        tick(len(session))
    return sessions


def pack(
    sessions: Sequence[Session],
    targets: Sequence[int],
    bounds: tuple[int, int],
    max_traces: int,
    rng: random.Random,
    tick: Callable[[], None],
    rejections: Counter[str],
) -> list[list[tuple[int, DraftTurn]]]:
    """Interleaved dialogues of near-by sessions with disjoint graphs and sub-questions.

    targets: wanted numbers of turns, one per dialogue; bounds: fewest and most turns. Returns, per dialogue, (index of the
    session in `sessions`, turn). Sessions that fit nowhere are left over.
    """
    words = [sorted({w for trace in traces_of(s) for w in content_words(trace.node.title)}) for s in sessions]
    postings: dict[str, list[int]] = defaultdict(list)
    for n, bag in enumerate(words):
        for word in bag:
            postings[word].append(n)
    gids = [frozenset(gids_of(s)) for s in sessions]
    sids = [frozenset(trace.node.sid for trace in traces_of(s)) for s in sessions]
    sizes = [len(traces_of(s)) for s in sessions]
    free = dict.fromkeys(range(len(sessions)))

    dialogues = []
    for target in targets:
        tried_seeds = 0
        for seed in list(free):
            chosen = _gather(
                seed, free, target, bounds[1], max_traces, words, postings, gids, sids, sizes, sessions
            )
            turns = sum(len(sessions[n]) for n in chosen)
            if turns >= bounds[0]:
                break
            tried_seeds += 1
            if tried_seeds == 20:
                chosen = []
                break
        else:
            chosen = []
        if not chosen:
            rejections["pack/too_few_turns"] += 1
            continue
        for n in chosen:
            del free[n]
        mixed = interleave([sessions[n] for n in chosen], rng)
        dialogues.append([(chosen[n], turn) for n, turn in mixed])
        tick()
    return dialogues


def _gather(
    seed: int,
    free: dict[int, None],
    target: int,
    most: int,
    max_traces: int,
    words: Sequence[Sequence[str]],
    postings: dict[str, list[int]],
    gids: Sequence[frozenset[str]],
    sids: Sequence[frozenset[str]],
    sizes: Sequence[int],
    sessions: Sequence[Session],
) -> list[int]:
    """The seed session and its nearest free neighbours, until `target` turns are reached."""
    score: dict[int, float] = defaultdict(float)
    for word in words[seed]:
        posting = postings[word]
        if len(posting) <= 200:
            for n in posting:
                score[n] += 1.0 / len(posting)
    near = [
        n for n, _ in sorted(score.items(), key=lambda item: (-item[1], item[0])) if n in free and n != seed
    ]
    near_set = set(near)
    chosen, turns, traces = [seed], len(sessions[seed]), sizes[seed]
    used_gids, used_sids = set(gids[seed]), set(sids[seed])
    questions = {turn.question for turn in sessions[seed]}
    for n in (*near, *(m for m in free if m not in near_set and m != seed)):
        if turns >= target:
            break
        size = len(sessions[n])
        if turns + size > most or traces + sizes[n] > max_traces or turns + size > target + 2:
            continue
        if (
            used_gids & gids[n]
            or used_sids & sids[n]
            or any(turn.question in questions for turn in sessions[n])
        ):
            continue
        chosen.append(n)
        turns, traces = turns + size, traces + sizes[n]
        used_gids |= gids[n]
        used_sids |= sids[n]
        questions.update(turn.question for turn in sessions[n])
    return chosen
