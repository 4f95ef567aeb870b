"""The rules a rewritten turn question has to pass (R1..R12), as pure functions.

In:  the question and what it must show or must not tell. Out: the names of the broken rules, in order.
Source: CMT-RAG appendix A (constraints of prompts A, B, C).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Sequence

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
    template: str = "",
    phrases: Collection[str] = (),
    outside: Sequence[str] = (),
) -> list[str]:
    """The rules a non-original question breaks.

    phrase: the reference phrase it must contain (R1). hidden: answers it must not tell (R2). fallbacks: how many
    `the answer to "..."` it uses (R7). earlier: questions of earlier turns (R11). source: the source question (R12).
    carried: (relocated sub-question, carrier question) it must cover (R9).

    Only for a model's question: template: the turn's template wording, whose words are always allowed. phrases: every
    "that <type>"; that of the antecedent's own type is allowed (R3). outside: answers and titles of nodes that are not
    the turn's (R10). A template takes its phrase from the antecedent's type and its words from the turn's nodes.
    """
    broken = []
    lower = question.lower()
    if phrase is not None and not _says(question, phrase):
        broken.append("R1")
    if any(contains_answer(question, answer) for answer in hidden):
        broken.append("R2")
    rest = lower.replace(phrase.lower(), " ") if phrase is not None else lower
    if any(_says(rest, other) and not _says(template, other) for other in phrases if other != phrase):
        broken.append("R3")
    if _RESIDUE.search(question):
        broken.append("R4")
    words = re.findall(r"\S+", question)
    if not question.endswith("?") or not 4 <= len(words) <= MAX_WORDS or len(question) > MAX_CHARS:
        broken.append("R5")
    if _repeats(lower):
        broken.append("R6")
    if fallbacks > 1 or question.count('"') % 2 or (template and question.count("“") != question.count("”")):
        broken.append("R7")
    if not question.isprintable() or any("\ud800" <= c <= "\udfff" for c in question):
        broken.append("R8")
    if carried is not None:
        said = set(content_words(question))
        aux, own = set(content_words(carried[0].replace(">>", " "))), set(content_words(carried[1]))
        if (aux and not aux & said) or (own and len(own & said) < 0.6 * len(own)):
            broken.append("R9")
    if any(contains_answer(question, name) and not contains_answer(template, name) for name in outside):
        broken.append("R10")
    if question in earlier:
        broken.append("R11")
    if question == source or (template and normalise(question) == normalise(source)):
        broken.append("R12")
    return broken


def _says(text: str, phrase: str) -> bool:
    """Whether the text holds the whole phrase, in upper or lower case."""
    return re.search(rf"\b{re.escape(phrase.lower())}\b", text.lower()) is not None


def _repeats(lower: str) -> bool:
    """A doubled word (except "that that", "had had") or a repeated 4-gram."""
    words = re.findall(r"[\w'-]+", lower)
    if any(a == b and a not in ("that", "had") and a.isalpha() for a, b in itertools.pairwise(words)):
        return True
    grams = list(zip(words, words[1:], words[2:], words[3:], strict=False))
    return len(set(grams)) != len(grams)
