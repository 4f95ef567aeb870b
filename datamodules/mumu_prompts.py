"""The prompts by which a language model words a turn, and how its answer is read.

In:  a prompt's letter and the JSON input of a turn; the names of broken rules. Out: the text to send; the question in
the text that comes back. Source: CMT-RAG appendix A.2, prompts A, B and C: their inputs and requirements, in our words.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

MAX_ANSWER = 5_000  # characters of an answer that are looked at

_STEPS = """\
Each step is a sub-question with its answer. "#n" stands for the answer of step n, "X >> relation" asks for \
that relation of X."""

_RULES = """\
- It is one question in plain English, at most 60 words, and ends with a question mark.
- It contains no answer of any step, and nothing that only the dropped part of the original question mentions.
- It contains no "#", ">>", brackets or line breaks.
Return JSON only: {"question": "..."}"""

PROMPTS = {
    "A": f"""\
You are given a part of the reasoning graph of a multi-hop question. {_STEPS}

Write one natural question whose answer is target_answer.
- It needs every given step and can be answered from the given steps alone.
- It does not use "that person", "that city" and the like: nothing was said before.
{_RULES}""",
    "B": f"""\
You are given the reasoning graph of a question and one more sub-question, moved here from a later question. \
{_STEPS}

Write one natural question that asks for relocated_sub_question in passing and then asks original_question.
- Its final answer stays target_answer; keep the content words of original_question.
- It names what relocated_sub_question is about.
- If reference_phrase is given, use it word for word in place of previous_answer, and no other phrase of its kind.
{_RULES}""",
    "C": f"""\
You are given a reasoning graph whose first step depends on the answer of an earlier turn of a conversation. {_STEPS}

Write one natural follow-up question whose answer is final_answer.
- It uses reference_phrase word for word in place of previous_answer, and no other phrase of its kind ("that city").
- It needs every given step. What original_question says about how to find previous_answer is dropped.
{_RULES}""",
}

RETRY = (
    "An earlier attempt was rejected{shown}:\n{rules}\nWrite another one that avoids this. Return JSON only."
)

EXPLANATIONS = {
    "json": 'no JSON object with a text under "question"',
    "R1": "it does not contain reference_phrase word for word",
    "R2": "it reveals an answer",
    "R3": "it refers back by a phrase other than reference_phrase",
    "R4": 'it contains "#n", ">>", brackets or a line break',
    "R5": "it does not end with a question mark, or has fewer than 4 or more than 60 words, or over 320 characters",
    "R6": "it repeats a word or a group of four words",
    "R7": "its quotation marks are unbalanced, or it says 'the answer to \"...\"' more than once",
    "R8": "it contains characters that cannot be printed",
    "R9": "it leaves out relocated_sub_question or too many words of original_question",
    "R10": "it mentions something outside the given steps",
    "R11": "it repeats an earlier question",
    "R12": "it is original_question unchanged",
}


def first_prompt(letter: str, block: Mapping[str, Any]) -> str:
    """The prompt of the first attempt."""
    return f"{PROMPTS[letter]}\n\nInput:\n{json.dumps(block, ensure_ascii=False, indent=1)}"


def second_prompt(first: str, question: str | None, broken: Sequence[str]) -> str:
    """The first prompt with what was wrong with its answer (`question`, None where none was found)."""
    shown = "" if question is None else f" ({json.dumps(question[:320], ensure_ascii=True)})"
    rules = "\n".join(f"- {rule}: {EXPLANATIONS[rule]}" for rule in broken)
    return f"{first}\n\n{RETRY.format(shown=shown, rules=rules)}"


def read_question(answer: str) -> str | None:
    """The text under "question" in the first JSON object that has one, or None."""
    decoder, at = json.JSONDecoder(), 0
    answer = answer[:MAX_ANSWER]
    while (at := answer.find("{", at)) >= 0:
        try:
            found, _ = decoder.raw_decode(answer, at)
        except (ValueError, RecursionError):
            found = {}
        if isinstance(found.get("question"), str):
            return found["question"].strip()
        at += 1
    return None


def prompt_hashes() -> dict[str, str]:
    """sha256 of each prompt text, for the manifest; `retry` covers the explanations too."""
    texts = {**PROMPTS, "retry": RETRY + json.dumps(EXPLANATIONS)}
    return {name: hashlib.sha256(text.encode()).hexdigest() for name, text in texts.items()}
