"""The token-level automaton of constrained decoding: whatever it lets through ends as a plan that parses.

In: the tokens emitted so far (`advance`). Out: the set of tokens that may follow (`allowed`). It accepts the linearised
plan of CMT-RAG section 3.1 and Figure 8 with the rules of `inference.traces.check_plan`:

    [PLAN] ( [TRACE] own id, forced [SubQ] text, not blank [KW] text [DEP] ( "[" n "]" )* [/TRACE] )+ [/PLAN]

* Text is judged byte by byte, so a token may merge anything: `][`, ` [A`, `28`, half of a character. Bytes must form
  UTF-8 without control characters; `[A` + digit must grow into `[An]` with 1 <= n < own id.
* Dependencies are distinct n with 1 <= n < own id.
* Added tokens and unused vocabulary rows never appear.
* With a budget, a token is allowed only if the shortest completion after it still fits.

How it stays cheap: text automaton states are few, and what a token does from each of them does not depend on own id
unless it reaches a digit of a reference. So per state one pass of a byte transition table over the whole vocabulary
(numpy) gives a mask that is kept; the few tokens that touch a number are kept in small tries and walked per step.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from inference.grammar_text import (
    DEAD,
    KIND,
    MAX_TEXT_COST,
    N_STATES,
    NUMBER,
    TABLE,
    TEXT_COST,
    byte_columns,
    run_columns,
    trie,
    walk,
)
from inference.tokens import PlanTokenizer
from inference.traces import DEP, END_PLAN, END_TRACE, KW, PLAN, SUBQ, TRACE

_DIGITS = range(0x30, 0x3A)


class PlanGrammar:
    """Automaton for one tokenizer, with its caches. `vocab_size` is the width V of the policy's logits.

    Masks are kept on `device`. Raises ValueError if the logits are narrower than the tokenizer.
    """

    def __init__(self, tokens: PlanTokenizer, vocab_size: int, device: torch.device | str = "cpu") -> None:
        if vocab_size < tokens.n_tokens:
            raise ValueError(
                f"the model has {vocab_size} vocabulary rows, the tokenizer {tokens.n_tokens} tokens: "
                "extend the model's vocabulary, or load the tokenizer it was trained with"
            )
        self.tokens, self.vocab_size, self.device = tokens, vocab_size, torch.device(device)
        self.structural = tokens.structural
        self.bytes_of = [token if isinstance(token, bytes) else b"" for token in tokens.token_bytes]
        text_ids = [index for index, data in enumerate(self.bytes_of) if data]
        # Where a vocabulary cannot finish every character byte by byte, none is begun that a token leaves open.
        self._whole_only = not {bytes([byte]) for byte in range(0x80, 0xC0)} <= set(self.bytes_of)
        self._ids = np.array(text_ids, dtype=np.int64)
        self._columns = byte_columns([self.bytes_of[i] for i in text_ids])
        self._text: dict[int, _TextRow] = {}
        self._masks: dict[tuple[Any, ...], torch.Tensor] = {}
        self._numbers = trie(
            (self.bytes_of[i], i) for i in text_ids if not self.bytes_of[i].strip(b"[]0123456789")
        )
        self._own_ids: dict[int, list[int]] = {}

    def start(self, first_id: int, max_traces: int = 64, budget: int | None = None) -> PlanState:
        """The state before [PLAN]; the plan's traces take the ids first_id, first_id + 1, …

        budget: most tokens of the whole plan, [PLAN] and [/PLAN] included. Raises ValueError if no plan fits.
        """
        if first_id < 1 or max_traces < 1:
            raise ValueError(f"first_id {first_id} and max_traces {max_traces} must be at least 1")
        state = PlanState(self, first_id, max_traces, budget)
        if budget is not None and budget < state.cost():
            raise ValueError(
                f"a plan that begins with trace {first_id} takes {state.cost()} tokens or more, not {budget}"
            )
        return state

    # -- masks --------------------------------------------------------------------------------------------------

    def mask(self, ids: list[int]) -> torch.Tensor:
        """Bool [V] of a few ids."""
        mask = torch.zeros(self.vocab_size, dtype=torch.bool, device=self.device)
        mask[ids] = True
        return mask

    def fixed_mask(self, *ids: int) -> torch.Tensor:
        """The same for structural tokens and own ids: kept, so callers must not write to it."""
        if ids not in self._masks:
            self._masks[ids] = self.mask(list(ids))
        return self._masks[ids]

    def own_id(self, number: int) -> list[int]:
        """The tokens of a trace's own identifier, as `PlanTokenizer.encode_plan` writes them."""
        if number not in self._own_ids:
            self._own_ids[number] = self.tokens.encode_text(str(number))
        return self._own_ids[number]

    def row(self, state: int) -> _TextRow:
        """What every token does from a state of the text automaton (computed once per state)."""
        found = self._text.get(state)
        if found is None:
            end, numeric = run_columns(self._columns, state)
            alive = end != DEAD
            if self._whole_only:
                alive &= end < 2 * KIND["c1"]
            sure = alive & ~numeric
            costs = np.full(self.vocab_size, 99, dtype=np.int8)
            costs[self._ids[sure]] = np.array(TEXT_COST, dtype=np.int8)[end[sure]]
            unsure = self._ids[alive & numeric]
            found = _TextRow(costs, trie((self.bytes_of[i], int(i)) for i in unsure))
            self._text[state] = found
        return found

    def text_mask(self, state: int, room: int, closing: int) -> torch.Tensor:
        """Tokens that from `state` surely lead to a text that `room` tokens or fewer can finish, and `closing` itself
        where the text may end now (kept: callers must not write to it)."""
        room = max(-1, min(room, MAX_TEXT_COST))
        key = ("text", state, room, closing)
        mask = self._masks.get(key)
        if mask is None:
            mask = torch.from_numpy(self.row(state).costs <= room).to(self.device)
            mask[closing] = TEXT_COST[state] == 0
            self._masks[key] = mask
        return mask


@dataclass
class _TextRow:
    costs: np.ndarray  # int8 [V]: least tokens to end the text after this token, 99 where it may not follow
    numeric: dict[Any, Any]  # trie of the tokens that touch a reference's number: judged per own id


@dataclass
class PlanState:
    """Where one plan stands. `allowed`, `forced`, `advance` and `done` are the interface; `copy` forks it."""

    grammar: PlanGrammar
    next_id: int
    max_traces: int
    budget: int | None
    phase: str = "start"  # start, plan, id, subq, kw, dep, after, done
    text: int = 0  # state of the text automaton (subq, kw)
    number: int = 0  # of a reference or dependency being written: its digits so far
    opened: bool = False  # dep: a bracket is open
    used: frozenset[int] = frozenset()  # dependencies of this trace
    spent: int = 0
    n_traces: int = 0
    run: list[int] = field(default_factory=list)  # forced tokens still to come: own-id digits and [SubQ]

    @property
    def done(self) -> bool:
        return self.phase == "done"

    def copy(self) -> PlanState:
        return replace(self)

    # -- reading ------------------------------------------------------------------------------------------------

    def allowed(self) -> torch.Tensor:
        """Bool [V] of the tokens that may come next. The tensor may be shared: do not write to it."""
        grammar = self.grammar
        few = self._choices()
        if few is not None:
            return grammar.mask(few) if self.phase == "dep" else grammar.fixed_mask(*few)
        tail, closing = (4, grammar.structural[KW]) if self.phase == "subq" else (3, grammar.structural[DEP])
        room = self._left() - 1 - tail
        mask = grammar.text_mask(self.text, room, closing)
        trie = grammar.row(self.text).numeric
        if trie and self.next_id > 1:
            ids = walk(trie, (self.text, self.number), self._text_step, lambda end: TEXT_COST[end[0]] <= room)
            if ids:
                mask = mask.clone()
                mask[ids] = True
        return mask

    def forced(self) -> int | None:
        """The only token that may come next, or None where there is a choice (or nothing: the plan is done).

        In a text it is looked for only when the budget runs out: a text hardly ever has one continuation.
        """
        few = self._choices()
        if few is None and self._left() <= MAX_TEXT_COST + 5:
            few = self.allowed().nonzero().flatten().tolist()
        return few[0] if few is not None and len(few) == 1 else None

    def _choices(self) -> list[int] | None:
        """The tokens that may come next, outside texts; None inside."""
        structural = self.grammar.structural
        match self.phase:
            case "start":
                return [structural[PLAN]]
            case "plan":
                return [structural[TRACE]]
            case "id":
                return [self.run[0]]
            case "dep" if not self.opened and len(self.used) == self.next_id - 1:
                return [structural[END_TRACE]]
            case "dep":
                begun = (self.number, self.opened, self.used)
                ids = walk(self.grammar._numbers, begun, self._dep_step, self._dep_fits)
                return ids if self.opened else [structural[END_TRACE], *ids]
            case "after":
                more = self.n_traces < self.max_traces and self._trace_cost() + 1 <= self._left()
                return [structural[TRACE], structural[END_PLAN]] if more else [structural[END_PLAN]]
            case "done":
                return []
        return None

    def cost(self) -> int:
        """Least number of tokens (counting one per byte of text) from here to the end of the plan."""
        match self.phase:
            case "start":
                return 2 + self._trace_cost()
            case "plan":
                return 1 + self._trace_cost()
            case "id":
                return len(self.run) + TEXT_COST[0] + 4
            case "subq":
                return TEXT_COST[self.text] + 4
            case "kw":
                return TEXT_COST[self.text] + 3
            case "dep":
                return self._dep_cost((self.number, self.opened, self.used)) + 2
            case "after":
                return 1
        return 0

    # -- writing ------------------------------------------------------------------------------------------------

    def advance(self, token: int) -> None:
        """Take one token. Raises ValueError if it may not follow."""
        if not 0 <= token < self.grammar.vocab_size:
            raise ValueError(f"token {token} lies outside the vocabulary of {self.grammar.vocab_size}")
        before = dict(self.__dict__)
        if not self._step(token) or self.cost() > self._left() - 1:
            self.__dict__.update(before)
            raise ValueError(f"token {token} may not follow here (phase {self.phase}, trace {self.next_id})")
        self.spent += 1

    def _step(self, token: int) -> bool:
        structural = self.grammar.structural
        match self.phase:
            case "start":
                self.phase = "plan"
                return token == structural[PLAN]
            case "plan":
                self._open_trace()
                return token == structural[TRACE]
            case "id":
                expected, *self.run = self.run
                if not self.run:
                    self._enter("subq")
                return token == expected
            case "subq" if token == structural[KW]:
                may_end = TEXT_COST[self.text] == 0
                self._enter("kw")
                return may_end
            case "kw" if token == structural[DEP]:
                may_end = TEXT_COST[self.text] == 0
                self._enter("dep")
                return may_end
            case "dep" if token == structural[END_TRACE]:
                may_end = not self.opened
                self.n_traces, self.next_id = self.n_traces + 1, self.next_id + 1
                self._enter("after")
                return may_end
            case "after" if token == structural[TRACE]:
                self._open_trace()
                return self.n_traces < self.max_traces
            case "after":
                self.phase = "done"
                return token == structural[END_PLAN]
            case "done":
                return False
        return self._write(token)

    def _write(self, token: int) -> bool:
        data = self.grammar.bytes_of[token] if token < len(self.grammar.bytes_of) else b""
        if not data:
            return False
        if self.phase == "dep":
            dep: Any = (self.number, self.opened, self.used)
            for byte in data:
                dep = self._dep_step(dep, byte)
                if dep is None:
                    return False
            self.number, self.opened, self.used = dep
            return True
        state: Any = (self.text, self.number)
        for byte in data:
            state = self._text_step(state, byte)
            if state is None:
                return False
        self.text, self.number = state
        return not (self.grammar._whole_only and self.text >= 2 * KIND["c1"])

    def _enter(self, phase: str) -> None:
        self.phase, self.number, self.opened, self.used = phase, 0, False, frozenset()
        self.text = 1 if phase == "kw" else 0  # keywords may be blank

    def _open_trace(self) -> None:
        self._enter("id")
        self.run = [*self.grammar.own_id(self.next_id), self.grammar.structural[SUBQ]]

    # -- budget -------------------------------------------------------------------------------------------------

    def _left(self) -> int:
        return 1 << 30 if self.budget is None else self.budget - self.spent

    def _trace_cost(self) -> int:
        return len(self.grammar.own_id(self.next_id)) + 6  # [TRACE] id [SubQ] x [KW] [DEP] [/TRACE]

    # -- the automata of a text and of the dependencies, byte by byte --------------------------------------------

    def _text_step(self, state: tuple[int, int], byte: int) -> tuple[int, int] | None:
        text, number = state
        following = int(TABLE[text, byte])
        if following >= N_STATES:
            return None
        if following >> 1 != NUMBER >> 1:
            return following, 0
        number = 10 * number + byte - 0x30
        return (following, number) if 1 <= number < self.next_id else None

    def _dep_step(self, state: tuple[int, bool, frozenset[int]], byte: int) -> Any:
        number, opened, used = state
        if not opened:
            return (0, True, used) if byte == 0x5B and len(used) < self.next_id - 1 else None
        if byte == 0x5D:
            ends = 1 <= number < self.next_id and number not in used
            return (0, False, used | {number}) if ends else None
        if byte not in _DIGITS or (number == 0 and byte == 0x30):
            return None
        number = 10 * number + byte - 0x30
        return (number, True, used) if _digits_to_go(number, self.next_id, used) is not None else None

    def _dep_cost(self, state: tuple[int, bool, frozenset[int]]) -> int:
        number, opened, used = state
        return 1 + (_digits_to_go(number, self.next_id, used) or 0) if opened else 0

    def _dep_fits(self, state: tuple[int, bool, frozenset[int]]) -> bool:
        return self._dep_cost(state) + 2 <= self._left() - 1


def _digits_to_go(number: int, own_id: int, used: frozenset[int]) -> int | None:
    """Fewest digits that turn `number` into an unused identifier below own_id; None if none do."""
    low, high, digits = number, number, 0
    if number == 0:
        low, high, digits = 1, 9, 1
    while low < own_id:
        top = min(high, own_id - 1)
        if top - low + 1 > sum(1 for dep in used if low <= dep <= top):
            return digits
        low, high, digits = 10 * low, 10 * high + 9, digits + 1
    return None
