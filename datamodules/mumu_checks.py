"""The rules a rewritten turn question has to pass (R1..R12), as pure functions.

In:  the question and what it must show or must not tell. Out: the names of the broken rules, in order.
Source: CMT-RAG appendix A (constraints of prompts A, B, C).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

from datamodules.mumu_text import content_words
from datamodules.musique import normalise

MAX_WORDS, MAX_CHARS = 60, 320
_RESIDUE = re.compile(r"#\d|>>|\[A|\[T_|[{}\n]")


def contains_answer(text: str, answer: str) -> bool:
    """Whether the normalised answer occurs in the text as a whole token sequence."""
    needle = normalise(answer)
    return bool(needle) and f" {needle} " in f" {normalise(text)} "


def check_question(
    question: str,
    *,
    phrase: str | None,
    hidden: Sequence[str],
    fallbacks: int,
    earlier: Sequence[str],
    source: str,
    carried: tuple[str, str] | None = None,
) -> list[str]:
    """The rules a non-original question breaks.

    phrase: the reference phrase it must contain (R1). hidden: answers it must not tell (R2). fallbacks: how many
    `the answer to "..."` it uses (R7). earlier: questions of earlier turns (R11). source: the source question (R12).
    carried: (relocated sub-question, carrier question) it must cover (R9). R3 (the type of the phrase) and R10
    (nodes outside the closure) are checked where the question is made.
    """
    broken = []
    lower = question.lower()
    if phrase is not None and not re.search(rf"\b{re.escape(phrase.lower())}\b", lower):
        broken.append("R1")
    if any(contains_answer(question, answer) for answer in hidden):
        broken.append("R2")
    if _RESIDUE.search(question):
        broken.append("R4")
    words = re.findall(r"\S+", question)
    if not question.endswith("?") or not 4 <= len(words) <= MAX_WORDS or len(question) > MAX_CHARS:
        broken.append("R5")
    if _repeats(lower):
        broken.append("R6")
    if fallbacks > 1 or question.count('"') % 2:
        broken.append("R7")
    if not question.isprintable() or any("\ud800" <= c <= "\udfff" for c in question):
        broken.append("R8")
    if carried is not None:
        said = set(content_words(question))
        aux, own = set(content_words(carried[0].replace(">>", " "))), set(content_words(carried[1]))
        if (aux and not aux & said) or (own and len(own & said) < 0.6 * len(own)):
            broken.append("R9")
    if question in earlier:
        broken.append("R11")
    if question == source:
        broken.append("R12")
    return broken


def _repeats(lower: str) -> bool:
    """A doubled word (except "that that", "had had") or a repeated 4-gram."""
    words = re.findall(r"[\w'-]+", lower)
    if any(a == b and a not in ("that", "had") and a.isalpha() for a, b in itertools.pairwise(words)):
        return True
    grams = list(zip(words, words[1:], words[2:], words[3:], strict=False))
    return len(set(grams)) != len(grams)
