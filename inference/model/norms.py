"""RMS norms with hand-written backward passes: two passes over memory instead of a chain of small operations.

In:  hidden states in any dtype.  Out: the normed states in the input's dtype; arithmetic is fp32.
Paper: Mamba-2 (gated RMSNorm before out_proj, norm after the gate).  Legend: D features, g group size.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last axis."""
    return _GatedRMSNorm.apply(x, None, weight_D, eps, x.shape[-1])


def gated_rms_norm(x: Tensor, gate: Tensor, weight_D: Tensor, eps: float, group: int) -> Tensor:
    """RMS norm of x * silu(gate) in groups of ``group`` features, times weight."""
    return _GatedRMSNorm.apply(x, gate, weight_D, eps, group)


class _GatedRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, gate, weight, eps, group):
        u = x.float() if gate is None else x.float() * F.silu(gate.float())
        grouped = u.unflatten(-1, (-1, group))
        inverse = (
            torch.linalg.vector_norm(grouped, dim=-1, keepdim=True).square_().div_(group).add_(eps).rsqrt_()
        )
        ctx.save_for_backward(x, gate, weight, inverse)
        ctx.group = group
        return torch.mul((grouped * inverse).flatten(-2), weight).to(x.dtype)

    @staticmethod
    def backward(ctx, grad):
        x, gate, weight, inverse = ctx.saved_tensors
        silu = None if gate is None else F.silu(gate.float())
        u = x.float() if gate is None else x.float() * silu
        normed = u.unflatten(-1, (-1, ctx.group)) * inverse
        grad_weight = None
        grad = grad.float()
        if ctx.needs_input_grad[2]:
            grad_weight = (grad * normed.flatten(-2)).flatten(0, -2).sum(0).to(weight.dtype)
        scaled = (grad * weight).unflatten(-1, (-1, ctx.group))
        mean = (scaled * normed).mean(-1, keepdim=True)
        grad_u = scaled.addcmul_(normed, mean, value=-1.0).mul_(inverse).flatten(-2)
        if gate is None:
            return grad_u.to(x.dtype), None, grad_weight, None, None
        grad_gate = torch.ops.aten.silu_backward(grad_u * x.float(), gate.float()).to(gate.dtype)
        return grad_u.mul_(silu).to(x.dtype), grad_gate, grad_weight, None, None
