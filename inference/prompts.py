"""What the reader is shown: the prompts of CMT-RAG C.2, and how they are kept within a model's context.

In:  a resolved sub-question (or the user's query with the turn's reasoning trace) and scored passages.
Out: the text of the prompt; with a budget, the lowest-scored passages are left out, the question never.

The final answer's prompt is the sub-question's with the lines `k. sub-question → answer` between passages and question.
Source: CMT-RAG C.2; design.md section 5.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

SYSTEM = (
    "Answer the question using only the provided paragraphs. Reply with only the answer span, yes, or no. "
    "Do not explain."
)


@dataclass(frozen=True)
class Passage:
    """A paragraph in the prompt and its score against the question (higher is better)."""

    paragraph_id: str
    title: str
    text: str
    score: float


@dataclass(frozen=True)
class Step:
    """One line of a reasoning trace: a resolved sub-question and what the reader answered."""

    number: int
    sub_question: str
    answer: str


@dataclass(frozen=True)
class Question:
    """One thing to ask the reader. `steps` are there for the final answer only; `facts` are lines of known answers."""

    text: str
    passages: tuple[Passage, ...] = ()
    steps: tuple[Step, ...] = ()
    facts: tuple[Step, ...] = ()


class PromptTooLong(ValueError):
    """A question that does not fit into the reader's context even without any paragraph."""


def render(question: Question) -> str:
    """The user message of C.2. Passages stand in the given order, numbered from 1."""
    parts = []
    if question.passages:
        parts.append("Provided paragraphs:")
        parts += [
            f"[Paragraph {n} | score={passage.score:.4f}]\nTitle: {passage.title}\n{passage.text}\n"
            for n, passage in enumerate(question.passages, 1)
        ]
    for heading, steps in (("Known facts:", question.facts), ("Reasoning trace:", question.steps)):
        if steps:
            parts.append("\n".join([heading, *map(_line, steps)]) + "\n")
    parts.append(f"Question: {question.text}\n\nAnswer:")
    return "\n".join(parts)


def messages(question: Question) -> list[dict[str, str]]:
    """The chat of C.2: system prompt and question."""
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": render(question)}]


def fit(question: Question, limit: int, count: Callable[[Question], int]) -> Question:
    """The question with as many of its passages as `limit` tokens hold; their order stays.

    The lowest-scored passages go first (of equal ones the later); the last one left is cut at a word rather than left
    out, then facts and steps go, oldest first. `count` gives the tokens of the whole prompt and is called about log2(n)
    times. Raises PromptTooLong when the question alone is over the limit.
    """
    if count(question) <= limit:
        return question
    bare = replace(question, passages=(), steps=(), facts=())
    needed = count(bare)
    if needed > limit:
        raise PromptTooLong(
            f"the question takes {needed:,} tokens and the reader has room for {limit:,}: ask something shorter"
        )
    ranked = sorted(range(len(question.passages)), key=lambda i: (-question.passages[i].score, i))

    def best(n: int) -> Question:
        kept = sorted(ranked[:n])
        return replace(question, passages=tuple(question.passages[i] for i in kept))

    most = _most(len(ranked), lambda n: count(best(n)) <= limit)
    if most > 0:
        return best(most)
    if question.passages:
        first = question.passages[ranked[0]]
        words = first.text.split(" ")

        def cut(n: int) -> Question:
            return replace(question, passages=(replace(first, text=" ".join(words[:n])),))

        length = _most(len(words), lambda n: count(cut(n)) <= limit)
        if length > 0:
            return cut(length)
    lines = question.facts + question.steps

    def newest(n: int) -> Question:
        kept = lines[len(lines) - n :]
        return replace(
            bare,
            facts=tuple(step for step in question.facts if step in kept),
            steps=tuple(step for step in question.steps if step in kept),
        )

    return newest(max(0, _most(len(lines), lambda n: count(newest(n)) <= limit)))


def _most(top: int, holds: Callable[[int], bool]) -> int:
    """The largest n in 0..top for which `holds`, which is true up to some n; -1 where it holds for none."""
    low, high = -1, top
    while low < high:
        middle = (low + high + 1) // 2
        if holds(middle):
            low = middle
        else:
            high = middle - 1
    return low


def _line(step: Step) -> str:
    return f"{step.number}. {step.sub_question} → {step.answer}"


def unique(passages: Sequence[Passage]) -> tuple[Passage, ...]:
    """Without repeated paragraphs: the first place, the best score."""
    out: dict[str, Passage] = {}
    for passage in passages:
        known = out.get(passage.paragraph_id)
        out[passage.paragraph_id] = passage if known is None or passage.score > known.score else known
    return tuple(out.values())
