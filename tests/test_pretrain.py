"""Pretraining text: what carries loss, what a reminder says, and how the kinds of documents are mixed."""

from __future__ import annotations

import random
import re
from itertools import pairwise

import pytest

from datamodules.mumu import Dialogue
from datamodules.mumu_relations import could_denote
from datamodules.mumu_text import phrase
from datamodules.packed_data import PlannedTurn
from datamodules.pretrain import (
    Layout,
    PretrainData,
    draw_reminders,
    encode_drill,
    encode_plain,
    encode_reminders,
    render_turn,
    weigh_references,
)
from datamodules.traces import planned_turns, read_split
from inference.traces import TraceDraft, TracePlan
from tests.tiny_training import tiny


def dialogue(split: str = "long", number: int = 0) -> Dialogue:
    return read_split(tiny().world, split, "train")[number]


LAYOUTS = pytest.mark.parametrize("layout", ["inline", "lines"])


@LAYOUTS
def test_a_dialogue_reads_as_questions_and_numbered_lines(layout: Layout) -> None:
    tokens, given = tiny().tokens(), dialogue()
    document = encode_plain(given, tokens, 10_000, 0.25, layout=layout)
    assert document is not None
    rendered = [render_turn(turn, layout) for turn in planned_turns(given)]
    assert tokens.decode(document.ids[1:].tolist()) == "".join(q + plan for q, plan in rendered)
    assert tokens.decode(document.ids[document.weights == 0.25].tolist()) == "".join(q for q, _ in rendered)
    assert tokens.decode(document.ids[document.weights == 1.0].tolist()) == "".join(p for _, p in rendered)
    assert set(document.ids.tolist()).isdisjoint(tokens.structural.values())


def test_layouts() -> None:
    traces = (TraceDraft(1, "Who sang it?", "sang", ()), TraceDraft(2, "Who knew [A1]?", "knew [A1]", (1,)))
    turn = PlannedTurn("Who knew its singer?", TracePlan(traces))
    assert render_turn(turn) == (
        "Who knew its singer?\n",
        "(1) Who sang it? / sang /\n(2) Who knew [A1]? / knew [A1] / [1]\n",
    )
    assert (
        render_turn(turn, "lines")[1]
        == "(1)\nWho sang it?\nsang\n-\n(2)\nWho knew [A1]?\nknew [A1]\n[1]\n=\n"
    )


def test_on_lines_a_field_has_the_tokens_it_has_in_a_plan() -> None:
    """So the base needs no other word for "city" than the stages do."""
    tokens = tiny().tokens()
    for turn in planned_turns(dialogue()):
        plan = tokens.encode_plan(turn.plan)[0]
        text = tokens.encode_text(render_turn(turn, "lines")[1])
        assert [i for i in plan if i in text] == [i for i in text if i in plan]


def test_a_long_dialogue_is_cut_at_a_turn_border() -> None:
    tokens, given = tiny().tokens(), dialogue()
    whole = encode_plain(given, tokens, 10_000, 0.0)
    assert whole is not None
    cut = encode_plain(given, tokens, len(whole) - 1, 0.0)
    assert cut is not None and len(cut) < len(whole)
    text = tokens.decode(cut.ids[1:].tolist())
    assert text == "".join(q + plan for q, plan in map(render_turn, planned_turns(given)[:-1]))
    assert encode_plain(given, tokens, 5, 0.0) is None


@LAYOUTS
def test_references_to_earlier_turns_weigh_more(layout: Layout) -> None:
    tokens = tiny().tokens()
    for given in read_split(tiny().world, "short", "train"):
        document = encode_plain(given, tokens, 10_000, 0.0, reference_weight=5.0, layout=layout)
        assert document is not None
        first, wanted = 1, ""
        for turn in planned_turns(given):
            numbers = re.findall(r"\[A?(\d+)\]", render_turn(turn, layout)[1])
            wanted += "".join(n for n in numbers if int(n) < first)
            first += len(turn.plan.traces)
        assert tokens.decode(document.ids[document.weights == 5.0].tolist()) == wanted


def test_weights_follow_bytes_not_characters() -> None:
    tokens = tiny().tokens()
    text = "(3)\nWho knew Zoë \U0001f600 and [A1]?\n[A1] [A2]\n[1][2]\n=\n"
    ids = tokens.encode_text(text)
    weights = weigh_references(text, ids, tokens, first_id=2, weight=3.0)
    assert tokens.decode([i for i, w in zip(ids, weights, strict=True) if w == 3.0]) == "111"


def test_a_reminder_names_the_most_recent_trace_it_could_mean() -> None:
    traces = dialogue("long", 1).traces
    for n in range(1, len(traces) + 1):
        known = traces[:n]
        drawn = draw_reminders(known, 99, random.Random(n))
        assert {words for words, _ in drawn} == {phrase(t.type) for t in known}
        for words, number in drawn:
            kind = next(t.type for t in known if phrase(t.type) == words)
            assert could_denote(kind, known[number - 1].type)
            assert not any(could_denote(kind, later.type) for later in known[number:])
    assert len(draw_reminders(traces, 3, random.Random(0))) == 3
    assert draw_reminders(traces, 0, random.Random(0)) == []


def test_only_the_number_of_a_reminder_carries_loss() -> None:
    tokens = tiny().tokens()
    ids, weights = encode_reminders([("that city", 5), ("that person", 123)], tokens)
    assert tokens.decode(ids) == "that city [A5]\nthat person [A123]\n"
    assert tokens.decode([i for i, w in zip(ids, weights, strict=True) if w]) == "5]\n123]\n"


@LAYOUTS
def test_a_drill_is_a_stretch_of_traces_with_reminders(layout: Layout) -> None:
    tokens = tiny().tokens()
    document = encode_drill(dialogue(), tokens, 6, random.Random(1), layout)
    text = tokens.decode(document.ids[1:].tolist())
    numbers = [int(n) for n in re.findall(r"^\((\d+)\)", text, re.M)]
    assert len(numbers) == 6 and all(b == a + 1 for a, b in pairwise(numbers))
    said = re.findall(r"^that .* \[A(\d+)\]$", text, re.M)
    assert len(said) >= 6 and {int(n) for n in said} <= set(numbers)
    assert tokens.decode(document.ids[document.weights > 0].tolist()) == "".join(f"{n}]\n" for n in said)
    assert document.plan_tokens == 0
    denser = encode_drill(dialogue(), tokens, 6, random.Random(1), layout, reminders=9)
    assert (denser.weights > 0).sum() > (document.weights > 0).sum()


def test_the_mix() -> None:
    def made(**options: object) -> PretrainData:
        data = PretrainData(
            str(tiny().world), seeds=[3], paragraphs_per_world=30, tokenizer=str(tiny().tokenizer), limit_dev=4,
            **options,  # type: ignore[arg-type]
        )  # fmt: skip
        data.setup()
        return data

    counts = {
        split: len(read_split(tiny().world, split, "train")) for split in ("stage1", "short", "long", "ultra")
    }
    data = made(mix={"stage1": 0.5, "short": 2.0, "paragraphs": 1.0})
    assert len(data.train_documents) == round(0.5 * counts["stage1"]) + 2 * counts["short"] + 30
    assert len(data.dev_documents) == 4
    drilled = made(mix={"drills": 2.0, "ultra": 1.0})
    assert len(drilled.train_documents) == 2 * counts["long"] + 3 * counts["ultra"]
    plain, asked = made(mix={"long": 1.0}), made(mix={"long": 1.0}, reminders=1.0)
    again = made(mix={"long": 1.0}, reminders=1.0)
    assert sum(map(len, asked.train_documents)) > sum(map(len, plain.train_documents))
    assert [d.ids.tolist() for d in asked.train_documents] == [d.ids.tolist() for d in again.train_documents]
    assert [d.ids.tolist() for d in asked.dev_documents] == [d.ids.tolist() for d in plain.dev_documents]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mix": {"epic": 1.0}}, r"data\.mix has the unknown key 'epic'"),
        ({"layout": "table"}, r"data\.layout is 'table': it is inline or lines"),
        ({"drill_reminders": 0}, r"data\.drill_reminders is 0"),
        ({"reminders": 1.5}, r"data\.reminders is 1\.5"),
        ({"drill_traces": (5, 2)}, r"data\.drill_traces is \[5, 2\]"),
    ],
)
def test_mistakes(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PretrainData(**options)
