"""The reader's prompts: their structure, and what leaves them when the context is small."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inference.prompts import Passage, PromptTooLong, Question, Step, fit, messages, render, unique
from inference.reader import tidy

FIRST = Passage("p_1", "Blue Rain", "Blue Rain is a song by Hinmam Zetor.", 0.75)
SECOND = Passage("p_2", "Red Snow", "Red Snow is a river.", 0.5)


def words(question: Question) -> int:
    return len(render(question).split())


def test_the_sub_question_prompt_is_that_of_the_paper() -> None:
    assert render(Question("Who sang Blue Rain?", (FIRST, SECOND))) == (
        "Provided paragraphs:\n"
        "[Paragraph 1 | score=0.7500]\nTitle: Blue Rain\nBlue Rain is a song by Hinmam Zetor.\n\n"
        "[Paragraph 2 | score=0.5000]\nTitle: Red Snow\nRed Snow is a river.\n\n"
        "Question: Who sang Blue Rain?\n\nAnswer:"
    )
    chat = messages(Question("Who?"))
    assert [m["role"] for m in chat] == ["system", "user"] and chat[1][
        "content"
    ] == "Question: Who?\n\nAnswer:"
    assert chat[0]["content"].startswith(
        "Answer the question using only the provided paragraphs. Reply with only"
    )


def test_the_final_prompt_has_the_reasoning_trace_before_the_query() -> None:
    steps = (Step(28, "Who sang Blue Rain?", "Hinmam Zetor"), Step(29, "Where was Hinmam Zetor born?", ""))
    text = render(Question("Where was its singer born?", (FIRST,), steps))
    assert text.endswith(
        "\n\nReasoning trace:\n28. Who sang Blue Rain? → Hinmam Zetor\n29. Where was Hinmam Zetor born? → \n\n"
        "Question: Where was its singer born?\n\nAnswer:"
    )


@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(0, 9)), max_size=8),
    st.integers(1, 12), st.integers(0, 4), st.integers(1, 250),
)  # fmt: skip
@settings(max_examples=200, deadline=None)
def test_the_budget_drops_the_lowest_scores_and_never_the_question(
    sizes: list[tuple[int, int]], asked: int, lines: int, limit: int
) -> None:
    passages = tuple(
        Passage(f"p_{n}", "t", "w " * size + "end", score / 10) for n, (size, score) in enumerate(sizes)
    )
    question = Question("q " * asked, passages, tuple(Step(n, "s", "a") for n in range(1, lines + 1)))
    if words(Question(question.text)) > limit:
        with pytest.raises(PromptTooLong, match="tokens"):
            fit(question, limit, words)
        return
    kept = fit(question, limit, words)
    assert kept.text == question.text and words(kept) <= limit
    if words(question) <= limit:
        assert kept == question
        return
    ids = [p.paragraph_id for p in kept.passages]
    assert ids == sorted(ids, key=lambda i: int(i[2:]))
    left_out = [p for p in passages if p.paragraph_id not in ids]
    assert all(a.score >= b.score for a in kept.passages for b in left_out)
    if kept.passages:
        assert kept.steps == question.steps
    else:
        assert kept.steps == question.steps[len(question.steps) - len(kept.steps) :]


def test_the_last_passage_is_cut_at_a_word() -> None:
    question = Question("Who?", (Passage("p_1", "T", "one two three four five", 1.0), SECOND))
    (passage,) = fit(question, 13, words).passages
    assert passage.text == "one two" and passage.paragraph_id == "p_1"


def test_repeated_paragraphs_are_one() -> None:
    again = Passage("p_2", "Red Snow", "Red Snow is a river.", 0.9)
    assert unique([SECOND, FIRST, again]) == (again, FIRST)


@pytest.mark.parametrize(
    ("said", "span"),
    [
        ("Hinmam Zetor", "Hinmam Zetor"), ("\n\n  Hinmam Zetor.\nBecause it says so.", "Hinmam Zetor"),
        ('Answer: "Blue Rain"', "Blue Rain"), ("**1923**", "1923"), ("", ""), ("J. R. R. Tolkien", "J. R. R. Tolkien"),
        ("Washington, D.C.", "Washington, D.C."), ("Yes", "Yes"), ('"', '"'),
    ],
)  # fmt: skip
def test_only_the_span_is_kept(said: str, span: str) -> None:
    assert tidy(said) == span
