"""The quadratic part of the chunked scan with a hand-written backward pass.

y_q = sum over s <= q of (C_q . B_s) exp(cum_q - cum_s) u_s, inside one chunk (Mamba-2 paper, section 6, step 1).

Written as an autograd function for memory traffic, not for mathematics: on a CPU the decay matrix (Q x Q for every
head and chunk) costs more than all matrix products together, so it is built in place, block by block, small enough
to stay in cache, and rebuilt in the backward pass instead of stored.  The scores C.B exist once per group of heads.

Legend: B batch, Z chunks, Q positions of a chunk, H heads, P head dim, G groups, N state; M = B*Z flattened.
"""

import torch
from torch import Tensor

# Elements of one block's decay matrix: 2^18 fp32 values are 1 MB, about one core's second-level cache.
_BLOCK_ELEMENTS = 1 << 18


def intra_chunk(
    u_BZQHP: Tensor, cum_BZQH: Tensor, B_BZQGN: Tensor, C_BZQGN: Tensor, idx_BZQ: Tensor | None
) -> Tensor:
    """Outputs of each chunk from its own inputs.

    Args:
        u_BZQHP: inputs times dt, compute dtype.
        cum_BZQH: fp32 cumulative log decay inside the chunk (non-increasing along Q).
        B_BZQGN, C_BZQGN: compute dtype.
        idx_BZQ: document numbers; positions of different documents do not see each other.

    Returns:
        y (B, Z, Q, H, P) in u's dtype.
    """
    batch, chunks = u_BZQHP.shape[:2]
    flat = [t.flatten(0, 1) for t in (u_BZQHP, cum_BZQH, B_BZQGN, C_BZQGN)]
    idx = None if idx_BZQ is None else idx_BZQ.flatten(0, 1)
    return _IntraChunk.apply(*flat, idx).unflatten(0, (batch, chunks))


def _blocks(count: int, heads: int, chunk: int):
    step = max(1, _BLOCK_ELEMENTS // (heads * chunk * chunk))
    return [slice(i, min(i + step, count)) for i in range(0, count, step)]


def _decay(cum_MQH: Tensor, hidden_MQS: Tensor, dtype: torch.dtype) -> Tensor:
    """exp(cum_q - cum_s) on allowed pairs and 0 elsewhere: (M, H, Q, S)."""
    cum_MHQ = cum_MQH.transpose(1, 2)
    decay = cum_MHQ[:, :, :, None] - cum_MHQ[:, :, None, :]
    return decay.masked_fill_(hidden_MQS[:, None], -torch.inf).exp_().to(dtype)


def _hidden(idx_MQ: Tensor | None, chunk: int, device) -> Tensor:
    future = torch.ones(1, chunk, chunk, dtype=torch.bool, device=device).triu(1)
    return future if idx_MQ is None else future | (idx_MQ[:, :, None] != idx_MQ[:, None, :])


class _IntraChunk(torch.autograd.Function):
    @staticmethod
    def forward(ctx, u_MQHP, cum_MQH, B_MQGN, C_MQGN, idx_MQ):
        count, chunk, heads = u_MQHP.shape[:3]
        groups = B_MQGN.shape[2]
        scores_MGQS = torch.matmul(C_MQGN.transpose(1, 2), B_MQGN.permute(0, 2, 3, 1))
        y_MQHP = torch.empty_like(u_MQHP, memory_format=torch.contiguous_format)
        for block in _blocks(count, heads, chunk):
            hidden = _hidden(None if idx_MQ is None else idx_MQ[block], chunk, u_MQHP.device)
            mixing = _decay(cum_MQH[block], hidden, u_MQHP.dtype)
            mixing.view(-1, groups, heads // groups, chunk, chunk).mul_(scores_MGQS[block][:, :, None])
            y_MQHP[block] = torch.matmul(mixing, u_MQHP[block].transpose(1, 2)).transpose(1, 2)
        ctx.save_for_backward(u_MQHP, cum_MQH, B_MQGN, C_MQGN, scores_MGQS, idx_MQ)
        return y_MQHP

    @staticmethod
    def backward(ctx, grad_MQHP):
        u_MQHP, cum_MQH, B_MQGN, C_MQGN, scores_MGQS, idx_MQ = ctx.saved_tensors
        count, chunk, heads = u_MQHP.shape[:3]
        groups = B_MQGN.shape[2]
        dtype = u_MQHP.dtype
        grad_MQHP = grad_MQHP.to(dtype)
        grad_u = torch.empty_like(u_MQHP, memory_format=torch.contiguous_format)
        grad_cum = torch.empty_like(cum_MQH, memory_format=torch.contiguous_format)
        grad_scores = torch.empty_like(scores_MGQS)
        for block in _blocks(count, heads, chunk):
            hidden = _hidden(None if idx_MQ is None else idx_MQ[block], chunk, u_MQHP.device)
            decay = _decay(cum_MQH[block], hidden, dtype)
            grad_MHQP = grad_MQHP[block].transpose(1, 2)
            u_MHSP = u_MQHP[block].transpose(1, 2)
            grad_mixing = torch.matmul(grad_MHQP, u_MHSP.transpose(2, 3))  # (M, H, Q, S)
            grad_mixing.mul_(decay)  # d / d scores, per head
            grouped = grad_mixing.view(-1, groups, heads // groups, chunk, chunk)
            torch.sum(grouped, dim=2, out=grad_scores[block])
            scores = scores_MGQS[block][:, :, None]
            decay.view(-1, groups, heads // groups, chunk, chunk).mul_(scores)  # now the mixing matrix
            grad_u[block] = torch.matmul(decay.transpose(2, 3), grad_MHQP).transpose(1, 2)
            grouped.mul_(scores)  # d / d (cum_q - cum_s)
            over_q = grad_mixing.sum(3, dtype=torch.float32) - grad_mixing.sum(2, dtype=torch.float32)
            grad_cum[block] = over_q.transpose(1, 2)
        grad_C = torch.matmul(grad_scores, B_MQGN.transpose(1, 2)).transpose(1, 2)
        grad_B = torch.matmul(grad_scores.transpose(2, 3), C_MQGN.transpose(1, 2)).transpose(1, 2)
        return grad_u, grad_cum, grad_B, grad_C, None
