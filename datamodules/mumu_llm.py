"""Realisation by a language model: turns drafted with template wordings get the wording of a model.

    drafted dialogues ──► distinct turns ──► prompt A, B or C ──► rules R1..R12 ──► second attempt ──► template

The graph is finished before: traces, dependencies, answers and evidence stay what they are, and only `question` and
`realiser` of a turn change. Every distinct turn is worded once, whatever dialogues it occurs in. With a response cache,
a build that was interrupted and resumed gives the same bytes. Source: CMT-RAG appendix A.2 (LLM-based question
realisation: temperature 0.2, 220 tokens, at most two attempts).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from datamodules.mumu_checks import check_question
from datamodules.mumu_operators import DraftTrace, DraftTurn, Key, traces_of
from datamodules.mumu_prompts import first_prompt, prompt_hashes, read_question, second_prompt
from datamodules.mumu_relations import HEAD_NOUNS
from datamodules.mumu_text import Wording, without_opener
from datamodules.musique import REFERENCE
from inference.llm import Completion, LLMClient, LLMRequest

TEMPERATURE, MAX_TOKENS, ATTEMPTS = 0.2, 220, 2
LETTERS = {"GS_A": "A", "SQR_B": "B", "GS_C": "C", "SQR_C": "C"}

Drafts = Sequence[Sequence[DraftTurn]]


@dataclass(frozen=True)
class Task:
    """A turn to be worded: its prompt, and what its question is checked against (`check_question`)."""

    prompt: str
    template: str
    source: str
    phrase: str | None
    hidden: tuple[str, ...]
    outside: tuple[str, ...]
    carried: tuple[str, str] | None

    def broken(self, question: str | None, phrases: Sequence[str]) -> list[str]:
        """The rules that the question breaks; ["json"] where there is none."""
        if question is None:
            return ["json"]
        return check_question(
            question,
            phrase=self.phrase,
            hidden=self.hidden,
            fallbacks=question.lower().count('the answer to "'),
            earlier=(),
            source=self.source,
            carried=self.carried,
            template=self.template,
            phrases=phrases,
            outside=self.outside,
        )


def realise(
    dialogues: Drafts,
    llm: LLMClient,
    wording: Wording,
    tell: Callable[[str, int, int], None],
    thinking: bool = False,
) -> tuple[list[list[DraftTurn]], dict[str, Any]]:
    """The dialogues in the model's words, and the `realisation` part of the manifest.

    A question that breaks a rule twice, or that another turn of its dialogue has (R11), stays the template's. tell:
    called with (what, done, total). thinking: leave the model's thinking mode as the server has it. Raises LLMError.
    """
    tasks = [tasks_of(dialogue) for dialogue in dialogues]
    phrases = known_phrases(dialogues, wording)
    rejections: dict[str, Counter[str]] = {}
    spent: dict[str, Completion] = {}
    questions: dict[Task, str] = {}
    distinct = dict.fromkeys(task for row in tasks for task in row if task is not None)
    pending = {task: task.prompt for task in distinct}
    for attempt in range(1, ATTEMPTS + 1):
        rejected = rejections[f"attempt {attempt}"] = Counter()
        requests = [_request(prompt, thinking) for prompt in pending.values()]
        answers = llm.complete_many(requests, partial(tell, f"word turns, attempt {attempt}"))
        again = {}
        for (task, prompt), answer in zip(pending.items(), answers, strict=True):
            spent[prompt] = answer
            question = read_question(answer.text)
            if broken := task.broken(question, phrases):
                rejected.update(broken)
                again[task] = second_prompt(task.prompt, question, broken)
            elif question is not None:
                questions[task] = question
        pending = again
    rejections["dialogue"] = Counter()
    worded = [
        _put(dialogue, [questions.get(task) if task else None for task in row], rejections["dialogue"])
        for dialogue, row in zip(dialogues, tasks, strict=True)
    ]
    return worded, {
        "model": llm.model,
        "temperature": TEMPERATURE,
        "max_tokens": MAX_TOKENS,
        "thinking": thinking,
        "prompts": prompt_hashes(),
        "turns": dict(sorted(Counter(turn.realiser for row in worded for turn in row).items())),
        "distinct_turns": len(distinct),
        "requests": len(spent),
        "rejections": {name: dict(sorted(counts.items())) for name, counts in rejections.items()},
        "tokens": {
            "prompt": sum(answer.prompt_tokens for answer in spent.values()),
            "completion": sum(answer.completion_tokens for answer in spent.values()),
        },
    }


def tasks_of(dialogue: Sequence[DraftTurn]) -> list[Task | None]:
    """Per turn what a model is asked; None for an original question."""
    traces = {trace.key: trace for trace in traces_of(dialogue)}
    return [None if turn.operator == "ORIG" else _task(turn, traces) for turn in dialogue]


def known_phrases(dialogues: Drafts, wording: Wording) -> list[str]:
    """Every "that <type>" a question could refer back with."""
    kinds = {trace.node.type for dialogue in dialogues for trace in traces_of(dialogue)}
    return sorted({wording.phrase(kind) for kind in {*kinds, *HEAD_NOUNS.values(), "year", "time"}})


def _task(turn: DraftTurn, traces: Mapping[Key, DraftTrace]) -> Task:
    own = turn.traces if turn.carried is None else turn.traces[1:]
    graph, kept = turn.graph, {trace.node.i for trace in own}
    antecedent = None if turn.antecedent is None else traces[turn.antecedent]
    block: dict[str, Any] = {
        "original_question": graph.question if turn.carried is None else turn.carried,
        "steps": _steps(own, turn.phrase),
        "final_answer" if LETTERS[turn.operator] == "C" else "target_answer": turn.answer,
    }
    hidden = [trace.node.answer for trace in turn.traces] + list(turn.aliases)
    if antecedent is not None:
        block |= {"previous_answer": antecedent.node.answer, "reference_phrase": turn.phrase}
        entered = [
            graph.nodes[ref].answer
            for trace in own
            for ref, dep in zip(trace.node.refs, trace.deps, strict=True)
            if dep == antecedent.key
        ]
        hidden += [antecedent.node.answer, *entered]
    carried = None
    if turn.carried is not None:
        block["relocated_sub_question"] = turn.traces[0].node.text
        carried = (turn.traces[0].node.text, without_opener(turn.carried))
    dropped = [node for node in graph.nodes if node.i not in kept]
    titles = [re.sub(r"\s*\(.*\)$", "", node.title) for node in dropped]
    return Task(
        first_prompt(LETTERS[turn.operator], block),
        turn.question,
        graph.question,
        turn.phrase,
        tuple(dict.fromkeys(hidden)),
        tuple(dict.fromkeys([node.answer for node in dropped] + titles)),
        carried,
    )


def _steps(traces: Sequence[DraftTrace], phrase: str | None) -> list[dict[str, Any]]:
    """The traces as numbered steps; a reference to an earlier turn reads as the reference phrase."""
    number = {trace.key: n for n, trace in enumerate(traces, 1)}
    steps = []
    for trace in traces:
        said = {
            ref + 1: f"#{number[dep]}" if dep in number else str(phrase)
            for ref, dep in zip(trace.node.refs, trace.deps, strict=True)
        }
        text = "".join(  # split at its group, every second part is the number of a reference
            said[int(part)] if n % 2 else part for n, part in enumerate(REFERENCE.split(trace.node.text))
        )
        steps.append({"n": number[trace.key], "sub_question": text, "answer": trace.node.answer})
    return steps


def _request(prompt: str, thinking: bool) -> LLMRequest:
    return LLMRequest([{"role": "user", "content": prompt}], TEMPERATURE, MAX_TOKENS, thinking=thinking)


def _put(
    dialogue: Sequence[DraftTurn], questions: Sequence[str | None], rejected: Counter[str]
) -> list[DraftTurn]:
    """The dialogue with the given questions; one that any other turn has, in either wording, is not taken (R11)."""
    out: list[DraftTurn] = []
    for n, (turn, question) in enumerate(zip(dialogue, questions, strict=True)):
        others = {other.question for other in (*dialogue[:n], *dialogue[n + 1 :], *out)}
        if question is not None and question in others:
            rejected["R11"] += 1
            question = None
        out.append(turn if question is None else replace(turn, question=question, realiser="llm"))
    return out
