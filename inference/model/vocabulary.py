"""The seven structural tokens as trainable rows beside a frozen, tied matrix.

In:  a loaded model and the plan tokenizer whose structural tokens have ids.
Out: the model with ``structural_rows`` (R, D), fp32 parameters that replace those rows as input and as output.
Paper: CMT-RAG B.1, B.3 (seven tokens; "jointly optimize the embedding and output rows").

Rows start from the mean of the trained rows.  A padded matrix that has room is never resized (the 2.7B model has
11 spare rows); a full one grows to the next multiple of 16 and says so.
"""

import logging
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

if TYPE_CHECKING:
    from inference.tokens import PlanTokenizer

log = logging.getLogger("trace_memory.model")
VOCABULARY_MULTIPLE = 16


def padded_size(tokens: int, multiple: int = VOCABULARY_MULTIPLE) -> int:
    """Rows of a matrix for so many tokens: the next multiple."""
    return -(-tokens // multiple) * multiple


class StructuralVocabulary:
    """Mixin for both backbones: where structural rows enter the embedding and the head.

    Attributes: ``structural_rows`` (R, D) fp32 or None; ``structural_head_rows`` (R, D), only where the head is not
    tied to the embedding; ``structural_ids`` (R,) int64.
    """

    structural_rows: nn.Parameter | None
    structural_head_rows: nn.Parameter | None
    structural_ids: Tensor | None

    def init_structural(self) -> None:
        """Registers the (still empty) parameters; to be called once in ``__init__``."""
        self.register_parameter("structural_rows", None)  # type: ignore[attr-defined]
        self.register_parameter("structural_head_rows", None)  # type: ignore[attr-defined]
        self.register_buffer("structural_ids", None, persistent=False)  # type: ignore[attr-defined]

    def with_structural_inputs(self, input_ids_BL: Tensor, embedded_BLD: Tensor) -> Tensor:
        """Embeddings with the structural rows put in place."""
        if self.structural_rows is None:
            return embedded_BLD
        match = input_ids_BL[..., None] == self.structural_ids
        rows = F.embedding(match.to(torch.int8).argmax(-1), self.structural_rows)
        return torch.where(match.any(-1, keepdim=True), rows.to(embedded_BLD.dtype), embedded_BLD)

    def with_structural_logits(self, hidden: Tensor, logits: Tensor) -> Tensor:
        """fp32 logits (..., V) with the structural columns put in place."""
        if self.structural_rows is None:
            return logits
        rows = self.structural_rows if self.structural_head_rows is None else self.structural_head_rows
        return logits.index_copy(-1, self.structural_ids, F.linear(hidden.to(rows.dtype), rows).float())


def extend_vocabulary(model: nn.Module, tokens: "PlanTokenizer") -> None:
    """Gives the model trainable rows for the structural tokens, in place.

    A model whose matrix already holds trained structural rows (``config.structural_token_ids``, written when a stage
    is merged) starts from those; any other starts from the mean embedding.

    Raises:
        ValueError: the tokenizer is not this model's (more tokens than rows, or other structural ids than the
            model was trained with).
    """
    ids = list(tokens.structural.values())
    config = model.config
    trained = getattr(config, "structural_token_ids", None)
    if trained is not None and list(trained) != ids:
        raise ValueError(
            f"mismatched tokenizer: the model was trained with structural tokens at ids {list(trained)}, "
            f"the tokenizer has them at {ids}; use the tokenizer that lies beside the model"
        )
    noted = getattr(config, "tokenizer_fingerprint", None)
    if noted is not None and noted != tokens.fingerprint():
        raise ValueError(
            f"mismatched tokenizer: the model was trained with {noted[:12]}…, this tokenizer is "
            f"{tokens.fingerprint()[:12]}…; use the tokenizer.json that was exported with the model"
        )
    embedding = model.get_input_embeddings()
    rows = embedding.weight.shape[0]
    plain = tokens.n_tokens - len(ids)
    if plain > rows:
        raise ValueError(
            f"mismatched tokenizer: it has {plain} tokens besides the structural ones, the model only {rows} rows"
        )
    head = _untied_head(model)
    matrices = [embedding.weight] if head is None else [embedding.weight, head.weight]
    starts = [_first_rows(weight, ids, tokens.n_tokens, trained is not None) for weight in matrices]
    if max(ids) >= rows:
        wanted = padded_size(max(ids) + 1)
        log.warning("vocabulary is full (%d rows): grown to %d for the structural tokens", rows, wanted)
        model.resize_token_embeddings(wanted)
    model.structural_rows = nn.Parameter(starts[0])
    if head is not None:
        model.structural_head_rows = nn.Parameter(starts[1])
    model.structural_ids = torch.tensor(ids, device=starts[0].device)


def fold_structural_rows(model: nn.Module) -> None:
    """Writes the structural rows into the matrix (and an untied head) and forgets them, in place."""
    if model.structural_rows is None:
        return
    ids = model.structural_ids.tolist()
    embedding, head = model.get_input_embeddings(), _untied_head(model)
    with torch.no_grad():
        embedding.weight[ids] = model.structural_rows.to(embedding.weight.dtype)
        if head is not None:
            head.weight[ids] = model.structural_head_rows.to(head.weight.dtype)
    model.config.structural_token_ids = ids
    model.structural_rows = model.structural_head_rows = model.structural_ids = None


@torch.no_grad()
def _first_rows(weight: Tensor, ids: list[int], n_tokens: int, trained: bool) -> Tensor:
    """(R, D) fp32: the matrix's own rows where they were trained, else the mean over every other token's row."""
    if trained:
        return weight[ids].float()
    if weight.device.type == "meta":
        return torch.empty(len(ids), weight.shape[1], device="meta")
    plain = torch.ones(len(weight), dtype=torch.bool, device=weight.device)
    plain[[i for i in ids if i < len(weight)]] = False
    plain[n_tokens:] = False
    return weight[plain].float().mean(0).repeat(len(ids), 1)


def _untied_head(model: nn.Module) -> nn.Linear | None:
    head = model.get_output_embeddings()
    return None if head.weight is model.get_input_embeddings().weight else head
