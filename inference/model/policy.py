"""What the generator drives: a model that takes new tokens of some rows and returns next-token logits.

In:  lists of new token ids, one ragged row a session.  Out: fp32 logits after each row's last token, and the states.
Paper: CMT-RAG 3.1 (Mamba-2: the state is carried) and Table 3 (Transformer: the history is re-encoded each turn).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from inference.model.mamba import TraceMambaForCausalLM
from inference.model.scan import padding_mask
from inference.model.states import RecurrentStates
from inference.model.transformer import TransformerGenerator


def _check_rows(rows: Sequence[Sequence[int]]) -> None:
    if any(len(row) == 0 for row in rows):
        raise ValueError("every row needs at least one new token")


def _right_pad(rows: Sequence[Sequence[int]], device) -> tuple[Tensor, Tensor]:
    lengths = torch.tensor([len(row) for row in rows], device=device)
    ids = torch.zeros(len(rows), int(lengths.max()), dtype=torch.long)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = torch.as_tensor(row, dtype=torch.long)
    return ids.to(device), lengths


class MambaPolicy:
    """Carries the recurrent state: only new tokens are ever computed."""

    def __init__(self, model: TraceMambaForCausalLM):
        self.model = model.eval()
        self.vocab_size = model.config.vocab_size

    @property
    def device(self) -> torch.device:
        """Where the model lies."""
        return self.model.backbone.embeddings.weight.device

    def new_states(self, n: int) -> RecurrentStates:
        """States of n fresh sessions."""
        return RecurrentStates.zeros(self.model.config, n, self.device)

    @torch.no_grad()
    def feed(
        self, states: RecurrentStates, token_ids: Sequence[Sequence[int]]
    ) -> tuple[Tensor, RecurrentStates]:
        """Reads new tokens: (logits (B, V) after each row's last token, new states)."""
        _check_rows(token_ids)
        ids, lengths = _right_pad(token_ids, self.device)
        ragged = ids.shape[1] > 1
        hidden, states = self.model.hidden(
            ids, states=states, lengths_B=lengths if ragged else None, return_states=True
        )
        last = hidden[torch.arange(len(token_ids), device=ids.device), lengths - 1]
        return self.model.logits(last), states


@dataclass
class HistoryStates:
    """What a Transformer session has read: token ids, and the keys and values computed so far in this turn."""

    histories: list[list[int]]
    cache: Any = None
    cached: Tensor | None = None  # (B, M) bool, which cache columns are real tokens

    def __len__(self) -> int:
        return len(self.histories)

    def select(self, rows: Sequence[int]) -> "HistoryStates":
        """Some rows, in that order."""
        histories = [list(self.histories[i]) for i in rows]
        if self.cache is None or self.cached is None:
            return HistoryStates(histories)
        return HistoryStates(histories, _select_cache(self.cache, rows), self.cached[torch.as_tensor(rows)])

    @staticmethod
    def cat(parts: Sequence["HistoryStates"]) -> "HistoryStates":
        """Joins rows; their keys and values are dropped, so the next call encodes the histories again."""
        return HistoryStates([list(h) for part in parts for h in part.histories])


def _select_cache(cache: Any, rows: Sequence[int]) -> Any:
    from transformers import DynamicCache

    picked = DynamicCache()
    for i, layer in enumerate(cache.layers):
        index = torch.as_tensor(rows, device=layer.keys.device)
        picked.update(layer.keys.index_select(0, index), layer.values.index_select(0, index), i)
    return picked


class TransformerPolicy:
    """Re-encodes the whole history at the start of a turn; keys and values live until its end (``cat`` drops them)."""

    def __init__(self, model: TransformerGenerator):
        self.model = model.eval()
        self.vocab_size = model.get_input_embeddings().weight.shape[0]

    @property
    def device(self) -> torch.device:
        """Where the model lies."""
        return self.model.get_input_embeddings().weight.device

    def new_states(self, n: int) -> HistoryStates:
        """States of n fresh sessions."""
        return HistoryStates([[] for _ in range(n)])

    @torch.no_grad()
    def feed(self, states: HistoryStates, token_ids: Sequence[Sequence[int]]) -> tuple[Tensor, HistoryStates]:
        """Reads new tokens: (logits (B, V) after each row's last token, new states)."""
        from transformers import DynamicCache

        _check_rows(token_ids)
        histories = [history + list(new) for history, new in zip(states.histories, token_ids, strict=True)]
        if states.cache is None or states.cached is None:
            rows, cache = histories, DynamicCache()
            past = torch.zeros(len(rows), 0, dtype=torch.bool, device=self.device)
        else:
            # A cache grows in place: the caller's states must stay what they are.
            rows, cache = [list(new) for new in token_ids], _select_cache(states.cache, range(len(states)))
            past = states.cached
        ids, lengths = _right_pad(rows, self.device)
        full = torch.cat([past, padding_mask(lengths, ids.shape[1])], dim=1)
        positions = (full.long().cumsum(1) - 1).clamp(min=0)[:, past.shape[1] :]
        embedded = self.model.with_structural_inputs(ids, self.model.get_input_embeddings()(ids))
        out = self.model.model.base_model(
            inputs_embeds=embedded,
            attention_mask=full.long(),
            position_ids=positions,
            cache=cache,
            use_cache=True,
        )
        last = out.last_hidden_state[torch.arange(len(rows), device=ids.device), lengths - 1]
        return self.model.logits(last), HistoryStates(histories, cache, full)


def make_policy(model: torch.nn.Module) -> MambaPolicy | TransformerPolicy:
    """The policy for a loaded model."""
    return MambaPolicy(model) if isinstance(model, TraceMambaForCausalLM) else TransformerPolicy(model)
