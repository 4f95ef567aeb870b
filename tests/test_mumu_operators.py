"""Graph Splicing, Sub-question Relocation, interleaving and the splits, on hand-made graphs with known outcomes."""

from __future__ import annotations

import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from datamodules.mumu_interleave import finalise, interleave
from datamodules.mumu_operators import (
    BridgeIndex,
    Rejected,
    closure,
    gids_of,
    original,
    partial,
    relocate,
    splice,
    traces_of,
)
from datamodules.mumu_relations import could_denote
from datamodules.mumu_sessions import Pool, grow
from datamodules.mumu_splits import deduplicate, purge
from datamodules.mumu_text import Wording, annotate
from datamodules.musique import SrcGraph, SrcNode, references

WORDS = Wording()


def graph(gid: str, *steps: tuple[str, str], titles: str = "", question: str = "") -> SrcGraph:
    """A typed graph of (sub-question, answer) steps; sids are gid/step unless the sub-question starts with `@sid `."""
    nodes = []
    for n, (text, answer) in enumerate(steps):
        sid = f"{gid}/{n}"
        if text.startswith("@"):
            sid, _, text = text[1:].partition(" ")
        refs = tuple(k - 1 for k in references(text))
        nodes.append(SrcNode(n, sid, text, answer, refs, f"p_{titles}{sid}", f"{titles}{sid}"))
    text = question or f"The composed question of graph {gid}?"
    return annotate([SrcGraph(gid, "x", text, nodes[-1].answer, ("alias",), tuple(nodes), ())], WORDS)[0]


ALBUM = graph(
    "album", ("Green >> performer", "Steve Hillage"), ("#1 >> record label", "Virgin"), ("who owns #2", "Ed")
)
LABEL = graph(
    "label", ("Boo >> record label", "virgin"), ("which city is #1 located in", "Leeds"),
    ("Ann >> author", "Xi"), ("when did #3 come to #2", "1999"),
)  # fmt: skip
SPOUSE = graph("spouse", ("Dora >> spouse", "Emil Q"), ("#1 >> record label", "Mute"))
RIVER = graph(
    "river", ("which river runs past Ulm", "Danube"), ("#1 >> mouth of the watercourse", "Black Sea")
)


def test_closure_and_its_stop():
    diamond = graph("d", ("a", "1"), ("b #1", "2"), ("c", "3"), ("d #2 #3", "4"))
    assert closure(diamond, 3) == (0, 1, 2, 3)
    assert closure(diamond, 3, stop_at=1) == (2, 3)  # node 0 served only node 1
    assert closure(diamond, 1) == (0, 1)


def test_splice_by_hand():
    first = original(ALBUM)
    k = first.traces[1]  # "Virgin", normalises like the dropped "virgin"
    turn = splice((first,), k, LABEL, 0, WORDS)
    assert [t.node.i for t in turn.traces] == [1, 2, 3]
    assert turn.operator == "GS_C" and turn.phrase == "that company" and turn.antecedent == ("album", 1)
    assert turn.question == "When did the author of Ann come to the city that that company is located in?"
    rows = finalise([first, turn])
    assert [t.sub_question for t in rows[1].traces] == [
        "which city is [A2] located in", "Ann >> author", "when did [A5] come to [A4]",
    ]  # fmt: skip
    assert [t.deps for t in rows[1].traces] == [(2,), (), (4, 5)]
    assert rows[1].answer == "1999" and rows[1].aliases == ("alias",)


def test_mention_splice_by_hand():
    """A root about "Virgin", which an earlier turn answered, becomes a question about that turn's answer."""
    owner = graph("owner", ("Virgin >> founder", "Fay"), ("when was #1 born", "1951"))
    short = graph("short", ("Mute >> founder", "Fay"), ("when was #1 born", "1951"))
    first = original(ALBUM)
    k = first.traces[1]
    assert BridgeIndex([ALBUM, owner]).candidates(k) == []
    ((borrowed, r),) = BridgeIndex([ALBUM, owner, short], mentions=True).candidates(k)
    assert (borrowed.final, r) == (1, 2) and owner.nodes[0].refs == ()
    turn = splice((first,), k, borrowed, r, WORDS)
    assert (turn.operator, turn.phrase, turn.antecedent) == ("GS_C", "that company", ("album", 1))
    assert turn.question == "When was the founder of that company born?"
    rows = finalise([first, turn])
    assert [t.sub_question for t in rows[1].traces] == ["[A2] >> founder", "when was [A4] born"]
    assert [t.deps for t in rows[1].traces] == [(2,), (4,)]
    assert [t.source for t in rows[1].traces] == [("owner", 0), ("owner", 1)]
    ((borrowed, r),) = BridgeIndex([short], mentions=True).candidates(original(SPOUSE).traces[1])
    with pytest.raises(Rejected, match="other_entity"):  # "Mute" is too short a string to be sure
        splice((original(SPOUSE),), original(SPOUSE).traces[1], borrowed, r, WORDS)


def test_relocation_by_hand():
    carrier, follow = relocate((original(RIVER),), SPOUSE, WORDS)
    assert [t.key for t in carrier.traces] == [("spouse", 0), ("river", 0), ("river", 1)]
    assert carrier.operator == "SQR_B" and carrier.answer == "Black Sea"
    assert (
        "the spouse of Dora" in carrier.question and "composed question of graph river?" in carrier.question
    )
    assert [t.key for t in follow.traces] == [("spouse", 1)] and follow.operator == "SQR_C"
    assert follow.question == "What is the record label of that person?"
    rows = finalise([carrier, follow])
    assert rows[1].traces[0].sub_question == "[A1] >> record label" and rows[1].traces[0].deps == (1,)


def test_chain_of_relocations():
    """The follow-up of the first pair carries the next one, and keeps its own phrase."""
    other = graph("other", ("which treaty ended the war", "Pact Z"), ("who signed #1", "Ida"))
    session = relocate(relocate((original(RIVER),), SPOUSE, WORDS), other, WORDS)
    assert [t.operator for t in session] == ["SQR_B", "SQR_B", "SQR_C"]
    assert session[1].phrase == "that person" and "that person" in session[1].question
    assert session[2].phrase == "that treaty" and session[2].antecedent == ("other", 0)
    with pytest.raises(Rejected, match="carrier_loaded"):
        relocate(session[:2], graph("z", ("Z >> author", "Q"), ("#1 >> spouse", "R")), WORDS)


def test_partial_graph():
    turn = partial(ALBUM, 1, WORDS)
    assert turn.question == "What is the record label of the performer of Green?"
    assert (turn.operator, turn.answer, turn.aliases, len(turn.traces)) == ("GS_A", "Virgin", (), 2)
    leak = graph("leak", ("Ed Stone >> spouse", "Mo"), ("who met #1", "Stone"))
    with pytest.raises(Rejected, match="R10"):
        partial(leak, 0, WORDS)


SPLICE_REJECTIONS = {
    "graph_used": (ALBUM, 0),
    "other_entity": (graph("x", ("who leads Boo", "Virgin"), ("when did #1 end", "1990")), 0),
    "no_entry": (graph("x", ("Boo >> record label", "Virgin"), ("when did Ann end", "1990")), 0),
    "phrase_form": (graph("x", ("Boo >> record label", "Virgin"), ("who runs the new #1", "Al")), 0),
    "duplicate_sub_question": (
        graph("x", ("Boo >> record label", "Virgin"), ("@album/2 who owns #1", "Al")),
        0,
    ),
    "answer_known": (graph("x", ("Boo >> record label", "Virgin"), ("who made #1", "steve hillage")), 0),
    "R2": (graph("x", ("Boo >> record label", "Virgin"), ("who sold Virgin before #1", "Al")), 0),
    "R5": (graph("x", ("Boo >> record label", "Virgin"), ("who #1", "Al")), 0),
    "R12": (
        graph("x", ("B >> record label", "Virgin"), ("who ran #1", "Al"), question="Who ran that company?"),
        0,
    ),
}


@pytest.mark.parametrize("rule", SPLICE_REJECTIONS)
def test_splice_rejections(rule):
    first = original(ALBUM)
    other, r = SPLICE_REJECTIONS[rule]
    with pytest.raises(Rejected) as rejected:
        splice((first,), first.traces[1], other, r, WORDS)
    assert rejected.value.rule == rule


def test_splice_needs_fresh_evidence_and_a_clear_phrase():
    first = original(ALBUM)
    seen = graph("x", ("Boo >> record label", "Virgin"), ("who ran #1", "Al"))
    node = seen.nodes[1]
    seen = SrcGraph(
        **{**vars(seen), "nodes": (seen.nodes[0], SrcNode(**{**vars(node), "pid": ALBUM.nodes[0].pid}))}
    )
    with pytest.raises(Rejected, match="evidence_seen"):
        splice((first,), first.traces[1], seen, 0, WORDS)
    # "that person" after Steve Hillage (trace 1) and Ed (trace 3) could only mean Ed.
    singer = graph("s", ("Boo >> performer", "Steve Hillage"), ("where did #1 go", "Bath"))
    with pytest.raises(Rejected, match="ambiguous_phrase"):
        splice((first,), first.traces[0], singer, 0, WORDS)


def test_homonyms_need_the_same_title():
    first = original(graph("a", ("which state is Xu located", "Georgia"), ("who ran #1", "Al"), titles="q"))
    other = graph("b", ("which state is Vo located", "Georgia"), ("who left #1", "Bo"), titles="r")
    with pytest.raises(Rejected, match="other_entity"):
        splice((first,), first.traces[0], other, 0, WORDS)
    assert BridgeIndex([other]).candidates(first.traces[0]) == [(other, 0)]


RELOCATE_REJECTIONS = {
    "graph_used": RIVER,
    "duplicate_sub_question": graph("x", ("@river/0 which river runs past Ulm", "Inn"), ("who saw #1", "Al")),
    "answer_known": graph("x", ("Dora >> spouse", "Emil"), ("who saw #1", "black sea")),
    "named_in_carrier": graph("x", ("Dora >> spouse", "Graph River"), ("who saw #1", "Al")),
    "ambiguous_phrase": graph("x", ("which river ends in Bonn", "Inn"), ("who saw #1", "Al")),
    "phrase_form": graph("x", ("Dora >> spouse", "Emil"), ("who saw the old #1", "Al")),
    "no_root": graph("x", ("Dora >> spouse", "Emil"), ("who saw it", "Al")),
}


@pytest.mark.parametrize("rule", RELOCATE_REJECTIONS)
def test_relocate_rejections(rule):
    with pytest.raises(Rejected) as rejected:
        relocate((original(RIVER),), RELOCATE_REJECTIONS[rule], WORDS)
    assert rejected.value.rule == rule


def test_relocate_rejects_a_shared_paragraph():
    node = SPOUSE.nodes[0]
    moved = SrcNode(**{**vars(node), "pid": RIVER.nodes[1].pid})
    same = SrcGraph(**{**vars(SPOUSE), "nodes": (moved, SPOUSE.nodes[1])})
    with pytest.raises(Rejected, match="shared_paragraph"):
        relocate((original(RIVER),), same, WORDS)


def test_carrier_phrase_stays_clear():
    """`Besides the person ..., when did that person die?` would be ambiguous, so that root is refused."""
    session = relocate((original(RIVER),), SPOUSE, WORDS)  # ends with "... of that person?"
    person = graph("p", ("Otto >> author", "Yan"), ("when did #1 come", "1901"))
    with pytest.raises(Rejected, match="ambiguous_phrase"):
        relocate(session, person, WORDS)


@given(
    st.integers(0, 10**6), st.lists(st.tuples(st.integers(0, 4), st.integers(1, 6)), min_size=1, max_size=7)
)
@settings(max_examples=150, deadline=None)
def test_interleaving_keeps_every_session_and_every_phrase(seed, plan):
    """I11, and the guard: between an antecedent and its phrase no other session brings a trace it could mean."""
    kinds = ["performer", "record label", "country", "place of birth", "capital"]
    sessions = []
    for n, (kind, length) in enumerate(plan):
        first = graph(f"s{n}", (f"E{n} >> {kinds[kind]}", f"a{n}"), ("#1 >> country", f"b{n}"))
        session = (original(first),)
        for step in range(length - 1):
            k = traces_of(session)[-1]
            kind_of = kinds[(kind + step) % len(kinds)]
            after = graph(
                f"s{n}.{step}", (f"F{n}{step} >> x", k.node.answer), (f"#1 >> {kind_of}", f"c{n}.{step}")
            )
            renamed = SrcNode(**{**vars(after.nodes[0]), "type": k.node.type, "title": k.node.title})
            after = SrcGraph(**{**vars(after), "nodes": (renamed, after.nodes[1])})
            session = (*session, splice(session, k, after, 0, Wording(phrases={})))
        sessions.append(session)
    mixed = interleave(sessions, random.Random(seed))
    for n, session in enumerate(sessions):
        assert tuple(turn for m, turn in mixed if m == n) == session
    assert len(mixed) == sum(map(len, sessions))

    # Undoing the renumbering gives every session back exactly as it is alone.
    rows = finalise([turn for _, turn in mixed])
    for n, session in enumerate(sessions):
        alone = finalise(session)
        own = [row for (m, _), row in zip(mixed, rows, strict=True) if m == n]
        back = {trace.id: k for k, trace in enumerate((t for row in own for t in row.traces), 1)}
        for got, want in zip(own, alone, strict=True):
            assert got.question == want.question
            for a, b in zip(got.traces, want.traces, strict=True):
                assert back[a.id] == b.id and tuple(back[d] for d in a.deps) == b.deps
                text = re.sub(r"\[A(\d+)\]", lambda m: f"[A{back[int(m.group(1))]}]", a.sub_question)  # noqa: B023
                assert text == b.sub_question

    order = [(m, t) for m, turn in mixed for t in turn.traces]
    start = {t.key: at for at, (_, t) in enumerate(order)}
    for m, turn in mixed:
        if turn.antecedent is not None:
            a, b = start[turn.antecedent], start[turn.traces[0].key]
            meant = order[a][1].node.type
            assert not any(o != m and could_denote(meant, t.node.type) for o, t in order[a + 1 : b])


def test_interleaving_really_mixes():
    sessions = []
    for n, kind in enumerate(("author", "capital", "religion", "award received")):
        first = graph(f"m{n}", (f"E{n} >> {kind}", f"a{n}"), ("#1 >> movement", f"b{n}"))
        after = graph(f"n{n}", (f"F{n} >> {kind}", f"a{n}"), ("when did #1 end", "1900"), titles="t")
        sessions.append((original(first), original(after)))
    orders = {tuple(m for m, _ in interleave(sessions, random.Random(s))) for s in range(40)}
    assert len(orders) > 10


def test_growth_stops_at_used_up_and_banned_graphs():
    other = graph("other", ("Boo >> record label", "Virgin"), ("when did #1 end", "1990"))

    def grown(banned: frozenset[str] = frozenset(), uses: int = 0) -> list[str]:
        pool = Pool([ALBUM, other], WORDS, max_uses=3)
        pool.uses["other"] = uses
        return gids_of(grow(original(ALBUM), 3, pool, random.Random(0), ("gs", "sqr"), banned=banned))

    assert grown() == grown(uses=2) == ["album", "other"]
    assert grown(banned=frozenset({"other"})) == grown(uses=3) == ["album"]


def test_deduplication_by_hand():
    a = graph("2hop__1_9", ("@1 A >> author", "B"), ("@9 #1 >> spouse", "C"))
    b = graph("2hop__2_9", ("@2 Z >> author", "Q"), ("@9 #1 >> spouse", "C"))
    head = graph(
        "3hop1__5_1_9", ("@5 K >> author", "L"), ("@1 #1 >> author", "B"), ("@9 #2 >> spouse", "the C")
    )
    kept, removed = deduplicate([head, b, a])
    assert [g.gid for g in kept] == ["2hop__2_9", "2hop__1_9"] and removed == {"same_tail": 1}
    twin = graph("2hop__3_9", ("@3 Y >> author", "b!"), ("@9 #1 >> spouse", "c"))
    kept, removed = deduplicate([twin, a])
    assert [g.gid for g in kept] == ["2hop__1_9"] and removed == {"same_answers": 1}


def test_purge_gives_way_to_dev():
    dev = [graph("d", ("@1 A >> author", "Bob"), ("@2 #1 >> spouse", "Eve"))]
    same_sid = graph("t1", ("@1 A >> author", "Ida"), ("@8 #1 >> child", "Al"), titles="z")
    same_title = graph("t2", ("@5 K >> author", "Uma"), ("@6 #1 >> child", "Al"))
    node = same_title.nodes[0]
    same_title = SrcGraph(
        **{**vars(same_title), "nodes": (SrcNode(**{**vars(node), "title": "2"}), same_title.nodes[1])}
    )
    bridge = graph("t3", ("@7 L >> author", "bob."), ("@4 #1 >> child", "Al"))
    free = graph("t4", ("@10 M >> author", "Joe"), ("@11 #1 >> child", "Eve"))  # shares only a final answer
    kept, removed = purge([same_sid, same_title, bridge, free], dev)
    assert [g.gid for g in kept] == ["t4"] and removed == {"sub_question": 1, "title": 1, "bridge": 1}


def test_hub_entities_may_be_shared():
    dev = [
        graph(f"d{n}", (f"@d{n} A{n} >> country", "Union"), (f"@e{n} #1 >> capital", f"C{n}"))
        for n in range(3)
    ]
    train = [
        graph(f"t{n}", (f"@t{n} B{n} >> country", f"N{n}"), (f"@u{n} #1 >> capital", f"K{n}"))
        for n in range(99)
    ]
    train.append(graph("hub", ("@h1 Z >> country", "the Union"), ("@h2 #1 >> capital", "Kx")))
    kept, removed = purge(train, dev)  # "Union" in 4 of 103 graphs, more than 1 %
    assert kept == train and not removed
