"""The automaton: what it allows parses and fits the budget; no sound plan is refused; masks agree with `advance`."""

import random
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from inference.grammar import PlanGrammar
from inference.traces import STRUCTURAL_TOKENS, TraceDraft, TracePlan, references
from tests.plan_tokenizers import MAKERS, ascii_only, byte_level, sound_plans, trained, wrap

GRAMMARS = {name: PlanGrammar(make(), make().n_tokens + 9) for name, make in MAKERS.items()}
GRAMMARS["bytes"] = PlanGrammar(wrap(byte_level([])), 300)
GRAMMARS["ascii_only"] = PlanGrammar(ascii_only(), ascii_only().n_tokens)
names = st.sampled_from(sorted(GRAMMARS))


def sample(state, rng, eager=0.5):
    """Walk to the end. Uniform over the allowed tokens, or, with probability `eager`, over one kind of them: added
    tokens, tokens that open a bracket, continue a reference or close one (hardly drawn by chance)."""
    table = state.grammar.tokens.token_bytes
    ids: list[int] = []
    while not state.done:
        choices = state.allowed().nonzero().flatten().tolist()
        assert choices, state
        forced = state.forced()
        if forced is not None:
            assert choices == [forced]
        last = table[ids[-1]] if ids else ""
        begun = isinstance(last, bytes) and last.endswith((b"[", b"[A", b"A"))
        kind = b"^[A0-9]" if begun else rng.choice([b"^\\[$", b"^\\[$", b"\\[A", b"[0-9]", b"\\]", b"added"])
        some = [
            i
            for i in choices
            if (re.search(kind, t) if isinstance(t := table[i], bytes) else kind == b"added")
        ]
        token = rng.choice(some if some and rng.random() < eager else choices)
        state.advance(token)
        ids.append(token)
    assert not state.allowed().any() and state.forced() is None
    return ids


@pytest.mark.parametrize("name", sorted(GRAMMARS))
@pytest.mark.parametrize("first_id", [1, 2, 9, 10, 99, 120])
def test_random_walks_parse_within_any_budget(name, first_id):
    grammar, rng = GRAMMARS[name], random.Random(f"{name} {first_id}")
    lengths, n_traces, n_deps, n_refs = [], 0, 0, 0
    for budget in [*range(20, 61)] * 2 + [200] * 10:
        ids = sample(grammar.start(first_id, budget=budget), rng, eager=rng.choice([0.0, 0.5, 0.9]))
        assert len(ids) <= budget
        plan = grammar.tokens.parse_plan(ids, first_id)  # runs check_plan
        lengths.append(len(ids))
        n_traces += len(plan)
        for trace in plan.traces:
            n_deps += len(trace.deps)
            for text in (trace.sub_question, trace.keywords):
                n_refs += len(references(text))
                assert not re.search(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]", text)
                assert not re.search(r"\[A0|\[A[0-9]+(?![0-9\]])", text)  # complete
    assert len(set(lengths)) > 10 and n_traces > len(lengths)
    if first_id > 1:
        assert n_deps > 5 and n_refs > 2


@pytest.mark.parametrize("name", sorted(GRAMMARS))
def test_the_smallest_budget_is_exact(name):
    grammar = GRAMMARS[name]
    for first_id in (1, 28, 120):
        least = 8 + len(
            grammar.tokens.encode_text(str(first_id))
        )  # seven structural tokens, [/PLAN] too, one of text
        with pytest.raises(ValueError, match=f"takes {least} tokens or more, not {least - 1}"):
            grammar.start(first_id, budget=least - 1)
        for seed in range(20):
            ids = sample(grammar.start(first_id, budget=least), random.Random(seed))
            assert len(ids) == least
            grammar.tokens.parse_plan(ids, first_id)


@settings(max_examples=300)
@given(names, sound_plans(), st.integers(0, 3))
def test_every_sound_plan_is_accepted(name, case, slack):
    grammar, (first_id, plan) = GRAMMARS[name], case
    text = "".join(trace.sub_question + trace.keywords for trace in plan.traces)
    if name == "ascii_only" and not text.isascii():
        return
    ids, carries = grammar.tokens.encode_plan(plan)
    state = grammar.start(first_id, budget=max(len(ids) + 8 + slack, 12))
    for token, _ in zip(ids, carries, strict=True):
        assert state.allowed()[token], (state, grammar.tokens.token_bytes[token])
        state.advance(token)
    assert state.done


@pytest.mark.parametrize("name", sorted(GRAMMARS))
def test_masks_say_what_advance_does(name):
    """The vectorised masks and the byte-by-byte automaton are two implementations: compare them on every token."""
    grammar, rng = GRAMMARS[name], random.Random(name)
    for first_id, budget in [(1, 30), (2, None), (11, 26), (13, None), (120, 22), (101, None)]:
        state = grammar.start(first_id, budget=budget)
        for _ in range(40):
            if state.done:
                break
            allowed = state.allowed()
            for token in range(grammar.vocab_size):
                trial = state.copy()
                if allowed[token]:
                    trial.advance(token)
                    assert trial.cost() <= trial._left()
                else:
                    with pytest.raises(ValueError, match="may not follow"):
                        trial.advance(token)
                    assert trial == state
            choices = allowed.nonzero().flatten().tolist()
            table = grammar.tokens.token_bytes
            structure = [
                i for i in choices if isinstance(table[i], str) or re.search(rb"[][0-9A\xc2-\xe3]", table[i])
            ]
            state.advance(rng.choice(structure or choices))


def drive(grammar, text, first_id, **options):
    """Advance through a plan's text, given as pieces: structural literals or single bytes."""
    table = {t: i for i, t in enumerate(grammar.tokens.token_bytes)}
    state = grammar.start(first_id, **options)
    for piece in re.split(r"(\[/?(?:PLAN|TRACE|SubQ|KW|DEP)\])", text):
        if piece in STRUCTURAL_TOKENS:
            state.advance(table[piece])
        elif state.phase == "id":
            for token in grammar.tokens.encode_text(piece):
                state.advance(token)
        else:
            for byte in piece.encode():
                state.advance(table[bytes([byte])])
    return state


def following(state):
    table = state.grammar.tokens.token_bytes
    return {
        t.decode("utf-8", "replace") if isinstance(t, bytes) else t
        for t, ok in zip(table, state.allowed(), strict=False)
        if ok
    }


def bytes_grammar():
    return GRAMMARS["bytes"]


def test_references_name_existing_traces():
    grammar = bytes_grammar()
    ends = {"[KW]"}
    assert following(drive(grammar, "[PLAN][TRACE]12[SubQ]Who is [A", 12)) >= {*"123456789", "l", *ends}
    assert "0" not in following(drive(grammar, "[PLAN][TRACE]12[SubQ]Who is [A", 12))
    assert following(drive(grammar, "[PLAN][TRACE]12[SubQ]Who is [A1", 12)) == {"0", "1", "]"}
    assert following(drive(grammar, "[PLAN][TRACE]12[SubQ]Who is [A2", 12)) == {"]"}
    first = following(drive(grammar, "[PLAN][TRACE]1[SubQ]Who is [A", 1))
    assert not first & set("0123456789") and "l" in first


def test_dependencies_are_distinct_and_exist():
    grammar = bytes_grammar()
    start = "[PLAN][TRACE]12[SubQ]Q[KW][DEP]"
    assert following(drive(grammar, start, 12)) >= {"[", "[/TRACE]"}
    assert following(drive(grammar, start + "[", 12)) == set("123456789")
    assert following(drive(grammar, start + "[1", 12)) == {"0", "1", "]"}
    assert following(drive(grammar, start + "[1][1", 12)) == {"0", "1"}
    assert following(drive(grammar, start + "[1][10][1", 12)) == {"1"}
    assert following(drive(grammar, start + "[1][10][11][", 12)) == set("23456789")
    assert following(drive(grammar, start + "[7][", 12)) == set("12345689")
    assert drive(grammar, "[PLAN][TRACE]2[SubQ]Q[KW][DEP][1]", 2).forced() == grammar.structural["[/TRACE]"]
    assert drive(grammar, "[PLAN][TRACE]1[SubQ]Q[KW][DEP]", 1).forced() == grammar.structural["[/TRACE]"]


def test_a_sub_question_holds_more_than_white_space():
    grammar = bytes_grammar()
    for blank in ("", " ", "\u00a0", "\u3000", "\u2003 \u202f\u205f\u1680"):
        assert "[KW]" not in following(drive(grammar, "[PLAN][TRACE]1[SubQ]" + blank, 1))
        assert "[DEP]" in following(drive(grammar, "[PLAN][TRACE]1[SubQ]Q[KW]" + blank, 1))
    for some in ("?", "é", "日", "、", "か", "あ ", "…", "€", "😀", "\u1681", "\u2064"):
        assert "[KW]" in following(drive(grammar, "[PLAN][TRACE]1[SubQ]" + some, 1)), some


@given(
    st.text(
        st.characters(exclude_categories=["Cs", "Cc"], exclude_characters="\u2028\u2029"),
        min_size=1,
        max_size=5,
    )
)
def test_any_printable_text_is_a_text(text):
    if not re.search(r"\[A[0-9]", text):
        state = drive(bytes_grammar(), "[PLAN][TRACE]1[SubQ]", 1)
        for token in state.grammar.tokens.encode_text(text):
            state.advance(token)
        assert ("[KW]" in following(state)) == bool(text.strip())


@pytest.mark.parametrize(
    "bad", [b"\n", b"\r", b"\x00", b"\x7f", b"\xc2\x85", b"\xe2\x80\xa8", b"\xe2\x80\xa9"]
)
def test_no_control_characters_or_line_breaks(bad):
    with pytest.raises(ValueError, match="may not follow"):
        state = drive(bytes_grammar(), "[PLAN][TRACE]1[SubQ]Q", 1)
        table = {t: i for i, t in enumerate(state.grammar.tokens.token_bytes)}
        for byte in bad:
            state.advance(table[bytes([byte])])


@given(st.binary(min_size=1, max_size=4))
def test_only_utf8_ends_a_text(data):
    """Against Python's own decoder."""
    grammar = bytes_grammar()
    table = {t: i for i, t in enumerate(grammar.tokens.token_bytes)}
    state = drive(grammar, "[PLAN][TRACE]1[SubQ]Q[KW]", 1)
    try:
        for byte in data:
            state.advance(table[bytes([byte])])
        ends = bool(state.allowed()[grammar.structural["[DEP]"]])
    except ValueError:
        ends = False
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        assert not ends
    else:
        assert ends == (re.search(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]", text) is None)


def test_own_ids_are_forced_as_the_training_text_spells_them():
    for grammar in GRAMMARS.values():
        state = grammar.start(99)
        run = []
        while (token := state.forced()) is not None:
            state.advance(token)
            run.append(token)
        gold, _ = grammar.tokens.encode_plan(TracePlan((TraceDraft(99, "Q", "", ()),)))
        assert run == gold[: len(run)] and run[-1] == grammar.structural["[SubQ]"]


def test_at_most_max_traces():
    grammar = bytes_grammar()
    one = "[TRACE]{}[SubQ]Q[KW][DEP][/TRACE]"
    text = "[PLAN]" + one.format(5) + one.format(6)
    assert following(drive(grammar, text, 5)) == {"[TRACE]", "[/PLAN]"}
    assert following(drive(grammar, text, 5, max_traces=2)) == {"[/PLAN]"}
    assert drive(grammar, text, 5, max_traces=2).forced() == grammar.structural["[/PLAN]"]


def test_no_added_token_and_no_unused_row_is_ever_text():
    grammar = GRAMMARS["neox"]
    mask = drive(grammar, "[PLAN][TRACE]1[SubQ]Q", 1).allowed()
    added = set(grammar.tokens.tokenizer.get_added_vocab().values()) - {grammar.structural["[KW]"]}
    assert not mask[grammar.tokens.n_tokens :].any() and not mask[sorted(added)].any()


def test_a_model_narrower_than_the_tokenizer_is_refused():
    with pytest.raises(ValueError, match="vocabulary rows"):
        PlanGrammar(trained(), trained().n_tokens - 1)
    with pytest.raises(ValueError, match="at least 1"):
        bytes_grammar().start(0)


def test_masks_are_shared_but_never_changed():
    grammar = bytes_grammar()
    state = drive(grammar, "[PLAN][TRACE]12[SubQ]Q [", 12)
    before = state.allowed().clone()
    sample(state.copy(), random.Random(1))
    assert torch.equal(state.allowed(), before)
