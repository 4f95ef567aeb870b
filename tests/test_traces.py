"""Plans as text: round trip for any text, errors for anything else, the rules of the trace namespace."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference.traces import (
    STRUCTURAL_TOKENS,
    PlanParseError,
    TraceDraft,
    TracePlan,
    check_plan,
    linearise,
    parse,
    references,
    sanitise_query,
)
from tests.plan_tokenizers import any_plans, sound_plans, texts

FIGURE_8 = (
    "[PLAN][TRACE]28[SubQ]Which major broadcaster, together with ABC and [A20], is based in New York?"
    "[KW]major broadcaster together ABC [A20] based New York[DEP][20][/TRACE]"
    "[TRACE]29[SubQ]Which label was bought by [A28] in the UK?[KW]label bought [A28] UK[DEP][28][/TRACE][/PLAN]"
)


def draft(own_id=1, question="Who?", keywords="", deps=()):
    return TraceDraft(own_id, question, keywords, deps)


def plan(*traces):
    return TracePlan(traces)


def test_figure_8_is_written_and_read_as_the_paper_prints_it():
    question = "Which major broadcaster, together with ABC and [A20], is based in New York?"
    first = draft(28, question, "major broadcaster together ABC [A20] based New York", (20,))
    second = draft(29, "Which label was bought by [A28] in the UK?", "label bought [A28] UK", (28,))
    assert linearise(plan(first, second)) == FIGURE_8
    assert parse(FIGURE_8) == plan(first, second)
    check_plan(parse(FIGURE_8), 28)


def test_dependencies_and_empty_fields():
    assert linearise(plan(draft(4, "Q", "", (3, 1)))) == "[PLAN][TRACE]4[SubQ]Q[KW][DEP][3][1][/TRACE][/PLAN]"
    assert linearise(plan(draft(1, "Q"))) == "[PLAN][TRACE]1[SubQ]Q[KW][DEP][/TRACE][/PLAN]"


@given(any_plans)
def test_round_trip_for_any_text(some_plan):
    assert parse(linearise(some_plan)) == some_plan


@given(texts)
def test_structural_literals_never_survive_unescaped_inside_a_field(text):
    line = linearise(plan(draft(1, text, text)))
    counts = [line.count(token) for token in STRUCTURAL_TOKENS]
    assert counts == [1] * 7


@given(
    st.lists(st.sampled_from([*STRUCTURAL_TOKENS, "1", "12", "[3]", "x", " ", "\\", "[", "0"]), max_size=14)
)
def test_parse_either_raises_its_own_error_or_inverts(parts):
    text = "".join(parts)
    try:
        found = parse(text)
    except PlanParseError:
        return
    assert parse(linearise(found)) == found


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected [PLAN], found the end"),
        ("hello", "expected [PLAN], found the end after 'hello'"),
        (FIGURE_8[:-7], "expected [TRACE] or [/PLAN], found the end"),
        (FIGURE_8 + "x", "unexpected 'x' after [/PLAN]"),
        (FIGURE_8 + "[PLAN]", "unexpected '[PLAN]' after [/PLAN]"),
        ("x" + FIGURE_8, "unexpected text 'x' before [PLAN]"),
        ("[PLAN][TRACE]x[SubQ]q[KW][DEP][/TRACE][/PLAN]", "begins with its identifier, found 'x'"),
        ("[PLAN][TRACE]01[SubQ]q[KW][DEP][/TRACE][/PLAN]", "begins with its identifier, found '01'"),
        ("[PLAN][TRACE]٣[SubQ]q[KW][DEP][/TRACE][/PLAN]", "begins with its identifier"),
        (
            "[PLAN][TRACE]2[SubQ]q[KW][DEP]1[/TRACE][/PLAN]",
            "dependencies of trace 2 are written like [3][5], found '1'",
        ),
        ("[PLAN][TRACE]2[SubQ]q[KW][DEP][0][/TRACE][/PLAN]", "dependencies of trace 2"),
        ("[PLAN][TRACE]2[SubQ]q[DEP][/TRACE][/PLAN]", "expected [KW], found [DEP]"),
        ("[PLAN][TRACE]2[SubQ]q[KW][DEP][/TRACE] [/PLAN]", "unexpected text ' ' before [/PLAN]"),
    ],
)
def test_parse_errors_say_what_was_found(text, message):
    with pytest.raises(PlanParseError) as error:
        parse(text)
    assert message in str(error.value)


@given(sound_plans())
def test_sound_plans_pass_the_check(case):
    first_id, sound = case
    check_plan(sound, first_id)
    with pytest.raises(PlanParseError):
        check_plan(sound, first_id + 1)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (plan(), "at least one trace"),
        (plan(draft(3)), "should have identifier 2"),
        (plan(draft(2), draft(4)), "trace 4 should have identifier 3"),
        (plan(draft(2, " \u3000")), "empty sub-question"),
        (plan(draft(2, deps=(1, 1))), "twice"),
        (plan(draft(2, deps=(2,))), "names [2]"),
        (plan(draft(2, "Who is [A2]?")), "names [A2]"),
        (plan(draft(2, "Who?", "x [A3]")), "names [A3]"),
        (plan(draft(2, "Who is [A0]?")), "names [A0]"),
    ],
)
def test_check_names_the_broken_rule(bad, message):
    with pytest.raises(PlanParseError) as error:
        check_plan(bad, 2)
    assert message in str(error.value)


def test_identifiers_are_positive():
    with pytest.raises(ValueError, match="out of range"):
        draft(0)
    with pytest.raises(ValueError, match="dependency -1"):
        draft(1, deps=(-1,))


def test_references_in_order_once_each():
    assert references("[A3] and [A12], [A3] [A_4] [a5] [A] [A1") == (3, 12)
    assert references("[A٣]") == ()
    assert references(f"[A{'9' * 5000}]") == ()


def test_literal_references_of_the_user_lose_their_brackets():
    assert sanitise_query("Is [A12] or [[A3]] [Alaska]?") == "Is (A12) or [(A3)] [Alaska]?"


@given(texts)
def test_a_sanitised_query_refers_to_nothing(text):
    assert references(sanitise_query(text)) == ()
    assert sanitise_query(sanitise_query(text)) == sanitise_query(text)
