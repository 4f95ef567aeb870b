"""Losses as pure functions over logits and weights. CMT-RAG 3.3 (supervised curriculum); design.md section 5.

The objective of one optimizer step is

    sum over the window's plan tokens of weight * -log p(token)  /  sum of those weights,

where the window is everything the step sees: all accumulated batches of all processes. Each batch contributes its own
part of that sum. Lightning divides every batch's loss by the accumulation factor and data-parallel training averages
gradients over processes; `window_loss` multiplies both back, so the step does not depend on how it was split up.

Legend: T tokens that carry loss, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint


def token_nll(logits_TV: Tensor, targets_T: Tensor) -> Tensor:
    """-log p of each target, fp32 (T,)."""
    return F.cross_entropy(logits_TV.float(), targets_T, reduction="none")


def chunked_token_nll(
    hidden_TD: Tensor, targets_T: Tensor, logits: Callable[[Tensor], Tensor], chunk: int | None
) -> Tensor:
    """`token_nll` of `logits(hidden)` without ever holding the logits of more than `chunk` tokens.

    Args:
        hidden_TD: hidden states of the positions that carry loss.
        targets_T: token ids.
        logits: hidden (T, D) -> logits (T, V).
        chunk: tokens at a time; the logits are computed again in the backward pass. None computes all at once.

    Returns:
        fp32 (T,).
    """
    if chunk is None or len(targets_T) <= chunk:
        return token_nll(logits(hidden_TD), targets_T)

    def part(hidden: Tensor, targets: Tensor) -> Tensor:
        return token_nll(logits(hidden), targets)

    pieces = zip(hidden_TD.split(chunk), targets_T.split(chunk), strict=True)
    return torch.cat([checkpoint(part, hidden, targets, use_reentrant=False) for hidden, targets in pieces])


def window_loss(
    nll_T: Tensor, weights_T: Tensor, window_weight: float, accumulate: int = 1, world: int = 1
) -> Tensor:
    """This batch's share of the step's loss, scaled so that Lightning's and DDP's divisions cancel.

    Args:
        nll_T: -log p per token.
        weights_T: its weight in the loss.
        window_weight: sum of the weights over the whole accumulation window and all processes.
        accumulate: the factor Lightning divides by (`accumulate_grad_batches`).
        world: the number of processes over which gradients are averaged.

    Raises:
        ValueError: a window without any weight has no loss.
    """
    if not window_weight > 0:
        raise ValueError(
            f"the accumulation window has weight {window_weight}: none of its tokens carries loss"
        )
    return (nll_T * weights_T).sum() / window_weight * (accumulate * world)


def linear_warmup_decay(step: int, total: int, warmup_fraction: float) -> float:
    """Factor of the learning rate at optimizer step `step` (from 0) of `total` (CMT-RAG B.3).

    Rises linearly to 1 over the first `warmup_fraction` of the steps, then falls linearly; the first step is already
    above 0 and so is the last (step `total` would be the first at 0), so every step trains.
    """
    warmup = int(total * warmup_fraction)
    if step < warmup:
        return (step + 1) / (warmup + 1)
    return max(0.0, (total - step) / max(1, total - warmup))
