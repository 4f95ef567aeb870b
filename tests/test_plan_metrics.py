"""Plan metrics against numbers worked out by hand."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference.metrics import (
    aggregate_plan_metrics,
    dependency_prf,
    hop_count_match,
    keyword_f1,
    normalise_squad,
    plan_exact_match,
    renumber,
    sub_question_f1,
    token_f1,
    wilson,
)
from inference.traces import TraceDraft, TracePlan
from tests.conftest import SHARED
from tests.plan_tokenizers import any_plans, texts


def plan(*rows):
    return TracePlan(
        tuple(TraceDraft(own_id, question, keywords, deps) for own_id, question, keywords, deps in rows)
    )


GOLD = plan((3, "Who founded [A1]?", "founded [A1]", (1,)), (4, "Where was [A3] born?", "[A3] born", (3, 2)))


def test_numbers_are_compared_by_the_trace_they_name() -> None:
    """One trace too many in the first turn shifts all later numbers, but not what the second turn refers to."""
    gold = [
        TracePlan((TraceDraft(1, "Who sang it?", "sang"),)),
        TracePlan(
            (TraceDraft(2, "Who knew [A1]?", "knew [A1]", (1,)), TraceDraft(3, "Why [A2]?", "[A2]", (2,)))
        ),
    ]
    written = [
        TracePlan((TraceDraft(1, "Who sang it?", "sang"), TraceDraft(2, "Who wrote it?", "wrote"))),
        TracePlan(
            (TraceDraft(3, "Who knew [A1]?", "knew [A1]", (1,)), TraceDraft(4, "Why [A3]?", "[A3]", (3,)))
        ),
    ]
    (first, _), (second, expected) = renumber(written, gold)
    assert first is not None and [t.id for t in first.traces] == [1, 999_999_999]
    assert second == expected == gold[1]
    extra = TracePlan((TraceDraft(3, "Who knew [A2]?", "knew [A2]", (2,)), written[1].traces[1]))
    (_, _), (second, _) = renumber([written[0], extra], gold)  # it means the trace that should not be there
    assert second is not None and second.traces[0].deps == (999_999_999,)
    assert second.traces[0].sub_question == "Who knew [A999999999]?"
    assert renumber([None, gold[1]], gold)[0] == (None, gold[0])
    (_, _), (second, _) = renumber([None, gold[1]], gold)  # nothing was written that [A1] could name
    assert second is not None and second.traces[0].deps == (999_999_999,)


def test_normalise_squad():
    assert normalise_squad(" The  U.S. has  AN apple—a day, [A28]! ") == "us has apple— day a28"


@pytest.mark.parametrize(
    ("a", "b", "f1"),
    [
        ("", "", 1),
        ("the", "a", 1),
        ("x", "", 0),
        ("yes, he did", "yes", 0.5),
        ("a b b", "b b c", 2 * 2 / 5),
        ("x", "y", 0),
    ],
)
def test_token_f1(a, b, f1):
    assert token_f1(a, b) == pytest.approx(f1)


@pytest.mark.shared
def test_token_f1_equals_the_official_squad_code():
    rows = json.loads((SHARED / "vectors" / "answer_metrics.json").read_text())
    assert rows
    for row in rows:
        assert token_f1(row["pred"], row["gold"]) == pytest.approx(row["squad2_f1"], abs=1e-9), row


def test_exact_match_ignores_case_punctuation_keywords_and_the_order_of_dependencies():
    same = plan((3, "who founded the [A1]", "", (1,)), (4, "Where was [A3] born", "x", (2, 3)))
    assert plan_exact_match(same, GOLD) and hop_count_match(same, GOLD)
    assert not plan_exact_match(
        plan((3, "Who founded [A1]?", "", ()), (4, "Where was [A3] born?", "", (3, 2))), GOLD
    )
    assert not plan_exact_match(
        plan((3, "Who founded [A2]?", "", (1,)), (4, "Where was [A3] born?", "", (3, 2))), GOLD
    )
    assert not plan_exact_match(plan((3, "Who founded [A1]?", "", (1,))), GOLD)
    assert not plan_exact_match(None, GOLD) and not hop_count_match(None, GOLD)


def test_sub_questions_match_one_to_one_by_best_f1():
    swapped = plan((3, "Where was [A3] born?", "[A3] born", ()), (4, "Who founded [A1]?", "founded", ()))
    assert sub_question_f1(swapped, GOLD) == 1.0
    assert keyword_f1(swapped, GOLD) == pytest.approx((1 + 2 / 3) / 2)
    # The one prediction equals the second gold question: it is not spent on the first, which shares "was" with it.
    gold = plan((1, "Who was it?", "", ()), (2, "Where was [A1] born?", "", ()))
    assert sub_question_f1(plan((1, "Where was [A1] born?", "", ())), gold) == 0.5
    doubled = plan(*((i, "Who founded [A1]?", "", ()) for i in (3, 4, 5, 6)))
    assert sub_question_f1(doubled, plan((3, "Who founded [A1]?", "", ()))) == 0.25
    assert sub_question_f1(None, GOLD) == 0.0


def test_dependency_counts():
    assert dependency_prf(GOLD, GOLD) == (3, 3, 3)
    assert dependency_prf(plan((3, "x", "", (1, 2)), (4, "x", "", (3,))), GOLD) == (2, 3, 3)
    assert dependency_prf(plan((3, "x", "", (3,))), GOLD) == (0, 1, 3)
    assert dependency_prf(None, GOLD) == (0, 0, 3)


def test_wilson_interval():
    assert wilson(0, 10) == (0.0, pytest.approx(0.2775, abs=1e-4))
    assert wilson(5, 10) == (pytest.approx(0.2366, abs=1e-4), pytest.approx(0.7634, abs=1e-4))
    assert wilson(10, 10)[1] == 1.0


def test_aggregate():
    one_edge = plan((3, "Who founded [A1]?", "founded [A1]", (1,)))
    metrics = aggregate_plan_metrics([(GOLD, GOLD), (None, GOLD), (one_edge, GOLD), (GOLD, GOLD)])
    values = {name: entry["value"] for name, entry in metrics.items()}
    assert values == {
        "plan_valid": 0.75,
        "plan_exact_match": 0.5,
        "hop_count_accuracy": 0.5,
        "sub_question_f1": pytest.approx((1 + 0 + 0.5 + 1) / 4),
        "keyword_f1": pytest.approx((1 + 0 + 0.5 + 1) / 4),
        "dependency_f1": pytest.approx(2 * 7 / (7 + 12)),
    }
    for entry in metrics.values():
        assert entry["n"] == 4 and 0 <= entry["low"] <= entry["value"] <= entry["high"] <= 1
    assert json.loads(json.dumps(metrics)) == metrics
    assert aggregate_plan_metrics([(GOLD, GOLD)])["dependency_f1"] == {
        "value": 1.0,
        "n": 1,
        "low": 1.0,
        "high": 1.0,
    }


def test_the_bootstrap_interval_is_that_of_the_mean():
    """400 turns, half right: standard error of the mean 0.025, so the 95 % interval is 0.5 ± 0.049."""
    right = plan((1, "Who?", "", ()))
    wrong = plan((1, "Else", "", ()))
    entry = aggregate_plan_metrics([(right, right), (wrong, right)] * 200)["sub_question_f1"]
    assert (entry["low"], entry["high"]) == (pytest.approx(0.451, abs=0.006), pytest.approx(0.549, abs=0.006))
    assert entry == aggregate_plan_metrics([(right, right), (wrong, right)] * 200)["sub_question_f1"]


def test_no_turns_is_an_error():
    with pytest.raises(ValueError, match="no turns"):
        aggregate_plan_metrics([])


@given(texts, texts)
def test_f1_is_symmetric_bounded_and_one_on_itself(a, b):
    assert token_f1(a, a) == 1.0
    assert token_f1(a, b) == token_f1(b, a)
    assert 0 <= token_f1(a, b) <= 1


@given(st.none() | any_plans, any_plans)
def test_metrics_are_bounded_and_perfect_on_the_gold_plan(pred, gold):
    for entry in aggregate_plan_metrics([(pred, gold)], resamples=20).values():
        assert 0 <= entry["low"] <= entry["high"] <= 1
    if gold.traces:
        assert all(
            entry["value"] == 1 for entry in aggregate_plan_metrics([(gold, gold)], resamples=20).values()
        )
