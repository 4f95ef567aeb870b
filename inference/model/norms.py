"""RMS norms with hand-written backward passes: two passes over memory instead of a chain of small operations.

In:  hidden states in any dtype.  Out: the normed states in the input's dtype; arithmetic is fp32.
Paper: Mamba-2 (gated RMSNorm before out_proj, norm after the gate).

On a CPU both passes go block by block, so that the fp32 intermediates of a block stay in cache.
Legend: T tokens (all leading axes), D features, g group size.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

# Elements of one block on a CPU: 2^17 fp32 values are 512 KB.
_BLOCK_ELEMENTS = 1 << 17


def rms_norm(x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last axis."""
    return _GatedRMSNorm.apply(x, None, weight_D, eps, x.shape[-1])


def gated_rms_norm(x: Tensor, gate: Tensor, weight_D: Tensor, eps: float, group: int) -> Tensor:
    """RMS norm of x * silu(gate) in groups of ``group`` features, times weight."""
    return _GatedRMSNorm.apply(x, gate, weight_D, eps, group)


def _blocks(x_TD: Tensor) -> list[slice]:
    count, features = x_TD.shape
    step = max(1, _BLOCK_ELEMENTS // features) if x_TD.device.type == "cpu" else max(1, count)
    return [slice(i, i + step) for i in range(0, count, step)]


class _GatedRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, gate, weight, eps, group):
        features = x.shape[-1]
        x_TD = x.reshape(-1, features)
        gate_TD = None if gate is None else gate.reshape(-1, features)
        out_TD = torch.empty_like(x_TD, memory_format=torch.contiguous_format)
        inverse = x.new_empty(len(x_TD), features // group, 1, dtype=torch.float32)
        for block in _blocks(x_TD):
            u = x_TD[block].float()
            if gate_TD is not None:
                u = u * F.silu(gate_TD[block].float())
            grouped = u.unflatten(-1, (-1, group))
            norm = torch.linalg.vector_norm(grouped, dim=-1, keepdim=True)
            inverse[block] = norm.square_().div_(group).add_(eps).rsqrt_()
            out_TD[block] = torch.mul((grouped * inverse[block]).flatten(-2), weight)
        ctx.save_for_backward(x_TD, gate_TD, weight, inverse)
        ctx.group, ctx.shape = group, x.shape
        return out_TD.view(x.shape)

    @staticmethod
    def backward(ctx, grad):
        x_TD, gate_TD, weight, inverse = ctx.saved_tensors
        grad_TD = grad.reshape(x_TD.shape)
        grad_x = torch.empty_like(x_TD, memory_format=torch.contiguous_format)
        grad_gate = None
        if gate_TD is not None:
            grad_gate = torch.empty_like(gate_TD, memory_format=torch.contiguous_format)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[2] else None
        for block in _blocks(x_TD):
            x_fp32, grad_fp32 = x_TD[block].float(), grad_TD[block].float()
            u = x_fp32
            if gate_TD is not None:
                gate_fp32 = gate_TD[block].float()
                silu = F.silu(gate_fp32)
                u = x_fp32 * silu
            normed = u.unflatten(-1, (-1, ctx.group)) * inverse[block]
            if grad_weight is not None:
                grad_weight += (grad_fp32 * normed.flatten(-2)).sum(0)
            scaled = (grad_fp32 * weight).unflatten(-1, (-1, ctx.group))
            mean = (scaled * normed).mean(-1, keepdim=True)
            grad_u = scaled.addcmul_(normed, mean, value=-1.0).mul_(inverse[block]).flatten(-2)
            if grad_gate is not None:
                grad_gate[block] = torch.ops.aten.silu_backward(grad_u * x_fp32, gate_fp32)
                grad_u = grad_u.mul_(silu)
            grad_x[block] = grad_u
        return (
            grad_x.view(ctx.shape),
            None if grad_gate is None else grad_gate.view(ctx.shape),
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None,
            None,
        )
