"""The two graph operators that link turns: Graph Splicing and Sub-question Relocation.

In:  annotated `SrcGraph`s and the session built so far (a list of `DraftTurn`).
Out: a new or changed turn, or the name of the rule that rejects the pair.

A session is immutable and its traces are named by (graph id, node); `mumu_sessions.finalise` numbers them. The
graph never depends on the wording. Source: CMT-RAG, section 3.1 and appendix A.2 (SQR carries the later
graph's sub-question into the earlier turn, as the appendix says; the auxiliary comes first, so that a turn's
answer is the answer of its last trace).
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from datamodules.mumu_checks import check_question, contains_answer
from datamodules.mumu_relations import could_denote
from datamodules.mumu_text import Worded, Wording, carrier_question, takes_phrase, without_opener
from datamodules.musique import SrcGraph, SrcNode, normalise

Key = tuple[str, int]  # (graph id, node)

# Strings that name several well-known entities; a splice on them needs the same title on both sides.
HOMONYMS = frozenset(
    """georgia washington victoria jordan lebanon paris london alexandria cambridge oxford birmingham athens
    rome columbia memphis phoenix jackson lincoln madison franklin jefferson hamilton monroe springfield
    columbus richmond kingston durham york lancaster perth halifax wellington hudson montana dakota virginia
    carolina charlotte houston austin dallas mercury saturn apollo amazon eden genesis""".split()
)


@dataclass(frozen=True)
class DraftTrace:
    """A node in a turn; `deps[j]` is the trace that node reference `refs[j]` (0-based) of the source means."""

    graph: SrcGraph
    node: SrcNode
    deps: tuple[Key, ...]

    @property
    def key(self) -> Key:
        return (self.graph.gid, self.node.i)


@dataclass(frozen=True)
class DraftTurn:
    """A turn before numbering. `antecedent` is the earlier trace its reference phrase stands for; `carried` is the
    question of an SQR carrier before a sub-question was relocated into it; `realiser` is what worded `question`."""

    graph: SrcGraph
    traces: tuple[DraftTrace, ...]
    question: str
    operator: str
    phrase: str | None = None
    antecedent: Key | None = None
    carried: str | None = None
    realiser: str = "template"

    @property
    def answer(self) -> str:
        return self.traces[-1].node.answer

    @property
    def aliases(self) -> tuple[str, ...]:
        final = self.traces[-1]
        return final.graph.aliases if final.node.i == final.graph.final else ()


Session = tuple[DraftTurn, ...]


class Rejected(Exception):
    """A pair an operator does not accept; `rule` is the counter it goes to."""

    def __init__(self, rule: str):
        super().__init__(rule)
        self.rule = rule


def traces_of(session: Iterable[DraftTurn]) -> list[DraftTrace]:
    return [trace for turn in session for trace in turn.traces]


def gids_of(session: Iterable[DraftTurn]) -> list[str]:
    """The distinct source graphs of a session, in order of appearance."""
    return list(dict.fromkeys(trace.graph.gid for trace in traces_of(session)))


def closure(graph: SrcGraph, final: int, stop_at: int | None = None) -> tuple[int, ...]:
    """The nodes needed to derive `final`, ascending; `stop_at` is not entered, so its private ancestors vanish."""
    kept, todo = set(), [final]
    while todo:
        i = todo.pop()
        if i in kept or i == stop_at:
            continue
        kept.add(i)
        todo.extend(graph.nodes[i].refs)
    return tuple(sorted(kept))


def drafts(
    graph: SrcGraph, kept: Sequence[int], bridge: tuple[int, Key] | None = None
) -> tuple[DraftTrace, ...]:
    """The kept nodes as traces; references to node `bridge[0]` point to the trace `bridge[1]` instead."""

    def target(r: int) -> Key:
        return bridge[1] if bridge is not None and r == bridge[0] else (graph.gid, r)

    return tuple(
        DraftTrace(graph, graph.nodes[i], tuple(target(r) for r in graph.nodes[i].refs)) for i in kept
    )


def original(graph: SrcGraph) -> DraftTurn:
    """The source question as it is."""
    traces = drafts(graph, range(len(graph.nodes)))
    return DraftTurn(graph, traces, graph.question, "ORIG", realiser="original")


def partial(graph: SrcGraph, k: int, wording: Wording) -> DraftTurn:
    """The closure ending at intermediate node k as a first turn (GS_A). Raises Rejected."""
    kept = closure(graph, k)
    worded = wording.question(graph, k, {})
    outside = [n for n in graph.nodes if n.i not in kept]
    turn = DraftTurn(graph, drafts(graph, kept), worded.text, "GS_A")
    if any(contains_answer(worded.text, n.answer) for n in outside):
        raise Rejected("R10")
    return _checked(turn, worded, ())


def unambiguous(session: Session, antecedent: DraftTrace) -> bool:
    """Whether "that <type>" said next can only mean `antecedent`: no later trace could be meant as well."""
    after = traces_of(session)
    at = [trace.key for trace in after].index(antecedent.key)
    return not any(could_denote(antecedent.node.type, trace.node.type) for trace in after[at + 1 :])


def same_entity(known: SrcNode, dropped: SrcNode) -> bool:
    """Whether two nodes with the same answer string mean the same entity, as far as type and title tell."""
    compatible = known.type == dropped.type or (
        could_denote(known.type, dropped.type) or could_denote(dropped.type, known.type)
    )
    text = normalise(known.answer)
    risky = len(text) <= 4 or text in HOMONYMS
    return compatible and not (risky and known.title != dropped.title)


def splice(session: Session, k: DraftTrace, graph: SrcGraph, r: int, wording: Wording) -> DraftTurn:
    """Graph splicing: `graph` becomes a follow-up in which node r is replaced by the earlier trace k.

    Keeps the minimal subgraph that derives the final answer without entering r. Raises Rejected with one of
    `graph_used`, `no_entry`, `phrase_form`, `duplicate_sub_question`, `answer_known`, `evidence_seen`,
    `other_entity`, `ambiguous_phrase`, R1..R12.
    """
    traces = traces_of(session)
    if any(trace.graph.gid == graph.gid for trace in traces):
        raise Rejected("graph_used")
    if not same_entity(k.node, graph.nodes[r]):
        raise Rejected("other_entity")
    kept = closure(graph, graph.final, stop_at=r)
    if r == graph.final or not any(r in graph.nodes[i].refs for i in kept):
        raise Rejected("no_entry")
    if not _sayable(graph, kept, r):
        raise Rejected("phrase_form")
    sids = {trace.node.sid for trace in traces}
    if any(graph.nodes[i].sid in sids for i in kept):
        raise Rejected("duplicate_sub_question")
    if normalise(graph.answer) in {normalise(trace.node.answer) for trace in traces}:
        raise Rejected("answer_known")
    pids = {trace.node.pid for trace in traces}
    if all(graph.nodes[i].pid is not None and graph.nodes[i].pid in pids for i in kept):
        raise Rejected("evidence_seen")
    if not unambiguous(session, k):
        raise Rejected("ambiguous_phrase")
    phrase = wording.phrase(k.node.type)
    worded = wording.question(graph, graph.final, {r: phrase})
    turn = DraftTurn(graph, drafts(graph, kept, (r, k.key)), worded.text, "GS_C", phrase, k.key)
    return _checked(turn, worded, session, bridge_answers=(k.node.answer, graph.nodes[r].answer))


def relocate(session: Session, graph: SrcGraph, wording: Wording) -> Session:
    """Sub-question relocation: the last turn of the session carries a root of `graph`, which then follows up.

    Returns the session with its last turn changed and one turn appended. Raises Rejected with the rule of the
    last root tried: `graph_used`, `carrier_loaded`, `duplicate_sub_question`, `answer_known`,
    `shared_paragraph`, `named_in_carrier`, `phrase_form`, `ambiguous_phrase`, `no_root`, R1..R12.
    """
    carrier, before = session[-1], session[:-1]
    traces = traces_of(session)
    if any(trace.graph.gid == graph.gid for trace in traces):
        raise Rejected("graph_used")
    if carrier.operator == "SQR_B" or any(trace.graph.gid != carrier.graph.gid for trace in carrier.traces):
        raise Rejected("carrier_loaded")
    sids = {trace.node.sid for trace in traces}
    if any(node.sid in sids for node in graph.nodes):
        raise Rejected("duplicate_sub_question")
    answers = {normalise(trace.node.answer) for trace in traces}
    if normalise(graph.answer) in answers:
        raise Rejected("answer_known")
    used = {ref for node in graph.nodes for ref in node.refs}
    rule = "no_root"
    for root in graph.nodes:
        if root.refs or root.i == graph.final or root.i not in used:
            continue
        try:
            return (*before, *_relocate_root(before, carrier, graph, root, answers, wording))
        except Rejected as rejected:
            rule = rejected.rule
    raise Rejected(rule)


def _sayable(graph: SrcGraph, kept: Iterable[int], r: int) -> bool:
    return all(takes_phrase(graph.nodes[i].text, r) for i in kept)


def _relocate_root(
    before: Session, carrier: DraftTurn, graph: SrcGraph, root: SrcNode, answers: set[str], wording: Wording
) -> Session:
    if normalise(root.answer) in answers:
        raise Rejected("answer_known")
    kept = [i for i in closure(graph, graph.final) if i != root.i]
    if not _sayable(graph, kept, root.i):
        raise Rejected("phrase_form")
    if root.pid is not None and root.pid in {trace.node.pid for trace in carrier.traces}:
        raise Rejected("shared_paragraph")
    if contains_answer(carrier.question, root.answer):
        raise Rejected("named_in_carrier")
    if any(could_denote(root.type, trace.node.type) for trace in carrier.traces):
        raise Rejected("ambiguous_phrase")
    if (
        carrier.antecedent is not None
    ):  # "Besides the person who ..., when did that person die?" must not be sayable
        meant = next(trace for trace in traces_of(before) if trace.key == carrier.antecedent)
        if could_denote(meant.node.type, root.type):
            raise Rejected("ambiguous_phrase")
    aux = DraftTrace(graph, root, ())
    noun = wording.noun(graph, root.i, {})
    question = carrier_question(noun.text, carrier.question, f"{graph.gid}/{carrier.graph.gid}")
    loaded = replace(
        carrier,
        traces=(aux, *carrier.traces),
        question=question,
        operator="SQR_B",
        carried=carrier.question,
        realiser="template",
    )
    worded = Worded(question, question.count('the answer to "'))
    loaded = _checked(loaded, worded, before, carried=(root, without_opener(carrier.question)))
    phrase = wording.phrase(root.type)
    worded = wording.question(graph, graph.final, {root.i: phrase})
    follow = DraftTurn(graph, drafts(graph, kept, (root.i, aux.key)), worded.text, "SQR_C", phrase, aux.key)
    follow = _checked(follow, worded, (*before, loaded), bridge_answers=(root.answer,))
    return (loaded, follow)


def _checked(
    turn: DraftTurn,
    worded: Worded,
    session: Session,
    bridge_answers: tuple[str, ...] = (),
    carried: tuple[SrcNode, str] | None = None,
) -> DraftTurn:
    """The turn itself when its question passes every rule; raises Rejected with the first broken one."""
    hidden = [trace.node.answer for trace in turn.traces] + list(turn.aliases) + list(bridge_answers)
    broken = check_question(
        turn.question,
        phrase=turn.phrase,
        hidden=hidden,
        fallbacks=worded.fallbacks,
        earlier=[earlier.question for earlier in session],
        source=turn.graph.question,
        carried=None if carried is None else (carried[0].text, carried[1]),
    )
    if broken:
        raise Rejected(broken[0])
    return turn


def borrow(graph: SrcGraph, root: int, known: SrcNode) -> SrcGraph:
    """`graph` with the subject of its root `X >> rel` turned into a reference to one more node, whose answer is X.

    The further node stands last, so every node keeps its index; it takes its type from `known`, the node of an earlier
    turn whose answer is X, and X for its title. Splicing with it in the place of the dropped node is a mention splice.
    """
    i = len(graph.nodes)
    subject, relation = graph.nodes[root].text.split(" >> ", 1)
    entered = replace(graph.nodes[root], text=f"#{i + 1} >> {relation}", refs=(i,))
    bridge = SrcNode(i, f"{graph.gid}/mention", "", subject, (), None, subject, known.type)
    nodes = (*graph.nodes[:root], entered, *graph.nodes[root + 1 :], bridge)
    return replace(graph, nodes=nodes, borrowed=True)


class BridgeIndex:
    """Where a splice can enter, by answer: (graph, node) pairs whose node is not final and has dependants.

    With `mentions`, also graphs one of whose roots is `X >> rel` with X the very answer (mention splice).
    """

    def __init__(self, graphs: Sequence[SrcGraph], mentions: bool = False):
        self._at: dict[str, list[tuple[SrcGraph, int]]] = {}
        self._mentioned: dict[str, list[tuple[SrcGraph, int]]] = {}
        for graph in graphs:
            for i in sorted({ref for node in graph.nodes for ref in node.refs}):
                self._at.setdefault(normalise(graph.nodes[i].answer), []).append((graph, i))
            for node in graph.nodes if mentions else ():
                subject, arrow, _ = node.text.partition(" >> ")
                if arrow and not node.refs:
                    self._mentioned.setdefault(subject, []).append((graph, node.i))

    def candidates(self, trace: DraftTrace) -> list[tuple[SrcGraph, int]]:
        found = self._at.get(normalise(trace.node.answer), [])
        pairs = [pair for pair in found if pair[0].gid != trace.graph.gid]
        for graph, root in self._mentioned.get(trace.node.answer, ()):
            if graph.gid != trace.graph.gid:
                pairs.append((borrow(graph, root, trace.node), len(graph.nodes)))
        return pairs


def grow_by_splicing(
    session: Session,
    index: BridgeIndex,
    wording: Wording,
    rng: random.Random,
    available: Callable[[SrcGraph], bool],
    rejections: Counter[str],
    tries: int = 8,
) -> Session | None:
    """One more GS turn, or None. The most recent trace with candidates is preferred with probability 0.6."""
    open_traces = [trace for trace in traces_of(session) if index.candidates(trace)]
    if not open_traces:
        return None
    open_traces.reverse()
    if rng.random() >= 0.6:
        rng.shuffle(open_traces)
    for k in open_traces:
        if not unambiguous(session, k):
            rejections["gs/ambiguous_phrase"] += 1
            continue
        pairs = index.candidates(k)
        for graph, r in rng.sample(pairs, min(tries, len(pairs))):
            if not available(graph):
                continue
            try:
                return (*session, splice(session, k, graph, r, wording))
            except Rejected as rejected:
                rejections[f"gs/{rejected.rule}"] += 1
    return None


def grow_by_relocation(
    session: Session,
    neighbours: Sequence[SrcGraph],
    wording: Wording,
    available: Callable[[SrcGraph], bool],
    rejections: Counter[str],
) -> Session | None:
    """One more SQR turn from the first topic neighbour that is accepted, or None."""
    for graph in neighbours:
        if not available(graph):
            continue
        try:
            return relocate(session, graph, wording)
        except Rejected as rejected:
            rejections[f"sqr/{rejected.rule}"] += 1
            if rejected.rule == "carrier_loaded":
                return None
    return None
