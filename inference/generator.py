"""TraceGen of CMT-RAG equation 4: ({drafts}, h_t) = TraceGen(h_{t-1}, q_t), for a batch of sessions.

In: sessions (a recurrent state and the next free trace id each) and one query per session. Out: one plan per session;
the sessions' states then hold everything up to and including [/PLAN] (paper section C.3).

1. The turn template (`PlanTokenizer.encode_query`; bos before the first turn) is fed on top of the carried state.
2. Each step chooses one token per row (greedy, or sampled with temperature and top-k), under the grammar or without.
3. Tokens the grammar forces (own ids, [SubQ] after them, …) need no decision: they ride along with the next call.
4. A row that finishes leaves the batch, so its state is the one right after its own last token.

Only new tokens are ever fed; what a policy remembers, and how, is its own affair (a Transformer keeps the history).
Legend: B rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

import torch

from inference.grammar import PlanGrammar, PlanState
from inference.tokens import PlanTokenizer
from inference.traces import END_PLAN, PlanParseError, TracePlan, check_plan


class States(Protocol):
    """What a policy carries between calls, one row per session."""

    def select(self, rows: list[int]) -> Self:
        """Copies of the named rows, in that order."""
        ...

    @staticmethod
    def cat(parts: list[Any]) -> Any:
        """The rows of all parts, in order."""
        ...


class Policy(Protocol):
    """A language model that continues from carried states (`inference.model.policy`)."""

    vocab_size: int

    def new_states(self, n: int) -> Any: ...

    def feed(self, states: Any, token_ids: list[list[int]]) -> tuple[torch.Tensor, Any]:
        """Take one or more new tokens per row: (fp32 logits [B, V] after each row's last token, new states)."""
        ...


@dataclass
class Sessions:
    """A batch of dialogues: the policy's states, and per row the next free trace id and whether a turn has begun it."""

    states: Any
    next_id: list[int]
    started: list[bool]

    def __len__(self) -> int:
        return len(self.next_id)

    def select(self, rows: list[int]) -> Sessions:
        """Independent copies of the named rows (a fork, where a row is named twice)."""
        ids, started = [self.next_id[row] for row in rows], [self.started[row] for row in rows]
        return Sessions(self.states.select(rows), ids, started)

    @staticmethod
    def cat(parts: Sequence[Sessions]) -> Sessions:
        """One batch of all rows. Raises ValueError for no parts."""
        if not parts:
            raise ValueError("no sessions to put together")
        states = type(parts[0].states).cat([part.states for part in parts])
        ids = [number for part in parts for number in part.next_id]
        return Sessions(states, ids, [flag for part in parts for flag in part.started])


@dataclass(frozen=True)
class Generated:
    """One decoded turn. An unparseable raw plan has plan None, valid False and the reason in error."""

    plan: TracePlan | None
    token_ids: tuple[int, ...]
    valid: bool
    error: str | None = None


class TraceGenerator:
    """Decodes trace plans with a policy. Raises ValueError if policy and tokenizer do not fit together."""

    def __init__(self, policy: Policy, tokens: PlanTokenizer) -> None:
        self.policy, self.tokens = policy, tokens
        self.grammar = PlanGrammar(tokens, policy.vocab_size, device=getattr(policy, "device", "cpu"))
        self._in_use = torch.arange(policy.vocab_size, device=self.grammar.device) < tokens.n_tokens
        self._stops = {tokens.structural[END_PLAN], tokens.bos_id, tokens.eos_id}

    def start(self, n: int) -> Sessions:
        """`n` fresh dialogues."""
        return Sessions(self.policy.new_states(n), [1] * n, [False] * n)

    @torch.no_grad()
    def generate(
        self,
        sessions: Sessions,
        queries: Sequence[str],
        constrained: bool = True,
        temperature: float = 0.0,
        top_k: int | None = None,
        max_new_tokens: int = 512,
        max_traces: int = 64,
        generator: torch.Generator | None = None,
    ) -> list[Generated]:
        """One turn for every session; the sessions are advanced in place (and left alone if anything raises).

        temperature 0 is greedy. max_new_tokens counts the plan's tokens, [PLAN] and [/PLAN] included. Under the
        grammar the plan always ends within it and has at most max_traces traces. Without the grammar a row ends at
        [/PLAN], at bos or eos, or at max_new_tokens; a plan that does not parse is invalid: the state stays as
        generated, next_id as it was.
        Samples depend only on the logits and `generator` (None: torch's default one).
        """
        self._check(sessions, queries, "queries")
        if temperature < 0 or (top_k is not None and top_k < 1) or max_new_tokens < 1:
            raise ValueError(
                f"temperature {temperature} must not be negative, top_k {top_k} and max_new_tokens {max_new_tokens} "
                "must be at least 1"
            )
        rows = []
        for i, prompt in enumerate(self._prompts(sessions, queries)):
            state = None
            if constrained:
                state = self.grammar.start(sessions.next_id[i], max_traces, max_new_tokens)
            rows.append(_Row(state, prompt, max_new_tokens, self._stops))
        states = self._decode(rows, sessions.states, temperature, top_k, generator)
        results = [self._result(row, first_id) for row, first_id in zip(rows, sessions.next_id, strict=True)]
        self._commit(sessions, states, [result.plan for result in results])
        return results

    @torch.no_grad()
    def force(self, sessions: Sessions, queries: Sequence[str], plans: Sequence[TracePlan]) -> None:
        """Advance every session by a turn whose plan is given (gold plans, replay).

        Raises PlanParseError, with nothing advanced, where a plan does not fit its session's trace ids.
        """
        self._check(sessions, queries, "queries")
        self._check(sessions, plans, "plans")
        for plan, first_id in zip(plans, sessions.next_id, strict=True):
            check_plan(plan, first_id)
        if len(sessions) == 0:
            return
        fed = [
            prompt + self.tokens.encode_plan(plan)[0]
            for prompt, plan in zip(self._prompts(sessions, queries), plans, strict=True)
        ]
        _, states = self.policy.feed(sessions.states, fed)
        self._commit(sessions, states, plans)

    # -- helpers ------------------------------------------------------------------------------------------------

    def _decode(
        self,
        rows: list[_Row],
        states: Any,
        temperature: float,
        top_k: int | None,
        generator: torch.Generator | None,
    ) -> Any:
        """Decode all rows to their end; returns the states in the rows' order."""
        live, order, parts = list(range(len(rows))), [], []
        while live:
            logits_BV, states = self.policy.feed(states, [rows[i].pending for i in live])
            if any(rows[i].done for i in live):
                ended = [at for at, i in enumerate(live) if rows[i].done]
                going = [at for at, i in enumerate(live) if not rows[i].done]
                order += [live[at] for at in ended]
                parts.append(states.select(ended) if going else states)
                if not going:
                    break
                states, logits_BV, live = states.select(going), logits_BV[going], [live[at] for at in going]
            masks = [rows[i].state.allowed() if rows[i].state else self._in_use for i in live]  # type: ignore[union-attr]
            for i, token in zip(live, choose(logits_BV, masks, temperature, top_k, generator), strict=True):
                rows[i].take(token)
        if len(parts) > 1:
            states = type(states).cat(parts)
            states = states.select(sorted(range(len(order)), key=order.__getitem__))
        return states

    def _prompts(self, sessions: Sessions, queries: Sequence[str]) -> list[list[int]]:
        bos = [self.tokens.bos_id]
        encoded = [self.tokens.encode_query(query) for query in queries]
        return [ids if started else bos + ids for ids, started in zip(encoded, sessions.started, strict=True)]

    def _result(self, row: _Row, first_id: int) -> Generated:
        ids = tuple(row.ids)
        if row.state is not None:
            return Generated(self.tokens.parse_plan(ids, first_id), ids, True)
        if ids[-1] not in self._stops:
            return Generated(None, ids, False, f"no {END_PLAN} within {row.limit} tokens")
        try:
            return Generated(self.tokens.parse_plan(ids, first_id), ids, True)
        except PlanParseError as error:  # the raw policy's mistakes are a result here, not a failure
            return Generated(None, ids, False, str(error))

    def _commit(self, sessions: Sessions, states: Any, plans: Sequence[TracePlan | None]) -> None:
        sessions.states = states
        sessions.started = [True] * len(sessions)
        sessions.next_id = [n + (len(p) if p else 0) for n, p in zip(sessions.next_id, plans, strict=True)]

    def _check(self, sessions: Sessions, given: Sequence[Any], what: str) -> None:
        if isinstance(given, str) or len(given) != len(sessions):
            count = "one string" if isinstance(given, str) else str(len(given))
            raise ValueError(f"{len(sessions)} sessions need as many {what}, got {count}")


@dataclass
class _Row:
    """One session's turn while it is decoded: `pending` holds the tokens that the policy has not seen yet."""

    state: PlanState | None
    pending: list[int]
    limit: int
    stops: set[int | None]
    ids: list[int] = field(default_factory=list)
    done: bool = False

    def __post_init__(self) -> None:
        self.pending = self.pending + self._forced()

    def take(self, token: int) -> None:
        self.ids.append(token)
        self.pending = [token]
        if self.state is None:
            self.done = token in self.stops or len(self.ids) == self.limit
            return
        self.state.advance(token)
        self.pending += self._forced()

    def _forced(self) -> list[int]:
        run: list[int] = []
        if self.state is not None:
            while (token := self.state.forced()) is not None:
                self.state.advance(token)
                run.append(token)
            self.ids += run
            self.done = self.state.done
        return run


def choose(
    logits_BV: torch.Tensor,
    masks: Sequence[torch.Tensor],
    temperature: float = 0.0,
    top_k: int | None = None,
    generator: torch.Generator | None = None,
) -> list[int]:
    """One token per row among the allowed ones (bool [V] per row). Greedy at temperature 0, the lowest id on ties.

    Sampling inverts the cumulative distribution at one uniform number per row, drawn on the generator's device:
    the same seed of a CPU generator gives the same tokens on any device, up to the rounding of the logits.
    """
    first = masks[0]
    mask = first if all(other is first for other in masks) else torch.stack(list(masks))
    scores_BV = logits_BV.float().masked_fill(~mask.to(logits_BV.device), float("-inf"))
    if temperature == 0:
        return scores_BV.argmax(-1).tolist()
    if top_k is not None and top_k < scores_BV.shape[-1]:
        scores_BV, ids_BV = scores_BV.topk(top_k, dim=-1)
    else:
        ids_BV = None
    cumulative_BV = (scores_BV.double() / temperature).softmax(-1).cumsum(-1)
    device = generator.device if generator is not None else "cpu"
    uniform_B1 = torch.rand(len(scores_BV), 1, generator=generator, device=device, dtype=torch.float64)
    target_B1 = uniform_B1.to(cumulative_BV.device) * cumulative_BV[:, -1:]
    picked_B1 = torch.searchsorted(cumulative_BV, target_B1, right=True)
    if ids_BV is not None:
        picked_B1 = ids_BV.gather(1, picked_B1.clamp_(max=ids_BV.shape[1] - 1))
    return picked_B1.flatten().tolist()
