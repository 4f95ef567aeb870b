"""Trace plans: what the generator writes in one turn, and their one-line text form.

In: sub-questions, keywords and dependencies. Out: `[PLAN][TRACE]29[SubQ]Which label was bought by [A28] in the
UK?[KW]label bought [A28] UK[DEP][28][/TRACE][/PLAN]` and back (CMT-RAG section 3.1, equation 5, and Figure 8).

* `[A28]` in a text refers to the answer of trace 28; `[28]` after `[DEP]` is the dependency on it. Both are ordinary
  text; only the seven STRUCTURAL_TOKENS delimit.
* Any text survives the round trip. A structural literal inside a text is written with a backslash after its bracket
  (`[KW]` becomes `[\\KW]`, `[\\KW]` becomes `[\\\\KW]`); `inference.tokens` needs no such escape, there the structural
  tokens are ids of their own.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

STRUCTURAL_TOKENS = ("[PLAN]", "[/PLAN]", "[TRACE]", "[/TRACE]", "[SubQ]", "[KW]", "[DEP]")
PLAN, END_PLAN, TRACE, END_TRACE, SUBQ, KW, DEP = STRUCTURAL_TOKENS

_NAMES = "|".join(token[1:-1] for token in STRUCTURAL_TOKENS)
_LITERAL = re.compile(rf"(\[(?:{_NAMES})\])")
_ESCAPE = re.compile(rf"\[(\\*(?:{_NAMES})\])")
_UNESCAPE = re.compile(rf"\[\\(\\*(?:{_NAMES})\])")
_REFERENCE = re.compile(r"\[A([0-9]{1,9})\]")
_ANY_REFERENCE = re.compile(r"\[(A[0-9]+)\]")
_ID = re.compile(r"[1-9][0-9]{0,8}")
_DEPS = re.compile(r"(?:\[[1-9][0-9]{0,8}\])*")


class PlanParseError(ValueError):
    """A text or token sequence is not a plan, or the plan breaks a rule of the trace namespace."""


@dataclass(frozen=True)
class TraceDraft:
    """One draft of equation 5: (q^decom, kw, deps), with the identifier it takes in the dialogue-wide namespace."""

    id: int
    sub_question: str
    keywords: str
    deps: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "deps", tuple(self.deps))
        for what, number in [("id", self.id), *(("dependency", dep) for dep in self.deps)]:
            if not 1 <= number <= 999_999_999:
                raise ValueError(
                    f"trace {what} {number} is out of range: identifiers run from 1 to 999999999"
                )


@dataclass(frozen=True)
class TracePlan:
    """The drafts of one turn, in the order in which they are executed."""

    traces: tuple[TraceDraft, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "traces", tuple(self.traces))

    def __len__(self) -> int:
        return len(self.traces)


def linearise(plan: TracePlan) -> str:
    """The plan as one line of text (one line as long as its fields hold no line break)."""
    parts = [PLAN]
    for trace in plan.traces:
        deps = "".join(f"[{dep}]" for dep in trace.deps)
        parts += [TRACE, str(trace.id), SUBQ, _escape(trace.sub_question), KW, _escape(trace.keywords)]
        parts += [DEP, deps, END_TRACE]
    return "".join([*parts, END_PLAN])


def parse(text: str) -> TracePlan:
    """The plan that `linearise` wrote. Raises PlanParseError where the text is not of that form."""
    pieces = _LITERAL.split(text)  # text, token, text, token, …, text
    return assemble(
        [(_unescape(pieces[i]), pieces[i + 1]) for i in range(0, len(pieces) - 1, 2)], _unescape(pieces[-1])
    )


def assemble(fields: list[tuple[str, str]], tail: str) -> TracePlan:
    """Build a plan from (text before a structural token, that token) pairs and the text after the last one.

    Both levels share it: `parse` cuts a string, `PlanTokenizer.parse_plan` cuts token ids.
    """
    stream = iter(fields)

    def take(*expected: str) -> tuple[str, str]:
        text, token = next(stream, (tail, "the end"))
        if token not in expected:
            raise PlanParseError(f"expected {' or '.join(expected)}, found {token} after {text!r}")
        return text, token

    def take_empty(*expected: str) -> str:
        text, token = take(*expected)
        if text:
            raise PlanParseError(f"unexpected text {text!r} before {token}")
        return token

    take_empty(PLAN)
    traces = []
    while take_empty(TRACE, END_PLAN) == TRACE:
        own_id, _ = take(SUBQ)
        if not _ID.fullmatch(own_id):
            raise PlanParseError(f"a trace begins with its identifier, found {own_id!r}")
        sub_question, _ = take(KW)
        keywords, _ = take(DEP)
        deps, _ = take(END_TRACE)
        if not _DEPS.fullmatch(deps):
            raise PlanParseError(f"dependencies of trace {own_id} are written like [3][5], found {deps!r}")
        numbers = tuple(int(number) for number in _ID.findall(deps))
        traces.append(TraceDraft(int(own_id), sub_question, keywords, numbers))
    rest = next(stream, None)
    if rest is not None or tail:
        raise PlanParseError(f"unexpected {(rest[0] + rest[1]) if rest else tail!r} after {END_PLAN}")
    return TracePlan(tuple(traces))


def references(text: str) -> tuple[int, ...]:
    """Identifiers named as `[A12]` in a text, each once, in order of first appearance (at most nine digits count)."""
    return tuple(dict.fromkeys(int(number) for number in _REFERENCE.findall(text)))


def sanitise_query(text: str) -> str:
    """A user's literal `[A12]` is no reference: the generator reads it as `(A12)`."""
    return _ANY_REFERENCE.sub(r"(\1)", text)


def check_plan(plan: TracePlan, first_id: int) -> None:
    """Raise PlanParseError unless the plan fits a dialogue whose next free trace identifier is `first_id`.

    The plan holds at least one trace; identifiers are first_id, first_id + 1, …; every dependency and every `[A…]` in
    sub-question and keywords names an earlier trace; dependencies are distinct; no sub-question is blank.
    """
    if not plan.traces:
        raise PlanParseError("a plan needs at least one trace")
    for expected, trace in enumerate(plan.traces, start=first_id):
        if trace.id != expected:
            raise PlanParseError(f"trace {trace.id} should have identifier {expected}")
        if not trace.sub_question.strip():
            raise PlanParseError(f"trace {trace.id} has an empty sub-question")
        if len(set(trace.deps)) != len(trace.deps):
            raise PlanParseError(f"trace {trace.id} lists a dependency twice: {list(trace.deps)}")
        named = [(dep, f"[{dep}]") for dep in trace.deps]
        named += [(ref, f"[A{ref}]") for ref in references(trace.sub_question) + references(trace.keywords)]
        for number, written in named:
            if not 1 <= number < trace.id:
                raise PlanParseError(f"trace {trace.id} names {written}, but only earlier traces exist")


def _escape(text: str) -> str:
    return _ESCAPE.sub(r"[\\\1", text)


def _unescape(text: str) -> str:
    return _UNESCAPE.sub(r"[\1", text)
