"""Mamba-2's two sequence operators, on PyTorch everywhere and on mamba-ssm's Triton kernels on a GPU.

In:  projected inputs of one layer, the recurrent state they start from, document borders or row lengths.
Out: the layer's scan output and the state after the last real token.
Paper: Mamba-2, "Transformers are SSMs" (state space duality, section 6: block decomposition), used by CMT-RAG 3.1.

Legend: B batch, L tokens, H heads, P head dim, G groups, N state, C conv channels, K conv width, Q chunk, Z chunks.

Three rules hold for every function here:
* states are fp32 and belong to the row's *first* document when ``seq_idx`` is given;
* ``seq_idx`` (B, L), non-decreasing, resets both the convolution window and the recurrent state where it changes;
* ``lengths`` (B,) marks right padding: pads get dt = 0 (decay 1, input 0), so the returned state is the state
  after the last real token, exactly.
"""

import functools
import importlib.util

import torch
import torch.nn.functional as F
from torch import Tensor

from inference.model.intra_chunk import intra_chunk

# Chunk matrices are (Z+1) x Z per head; longer rows are scanned in spans of this many chunks.
_SPAN_CHUNKS = 96


@functools.cache
def triton_kernels_available() -> bool:
    """Whether mamba-ssm is importable here (its Triton kernels then run on CUDA tensors)."""
    return importlib.util.find_spec("mamba_ssm") is not None


@functools.cache
def conv_kernel_available() -> bool:
    """Whether the optional causal-conv1d package is importable here."""
    return importlib.util.find_spec("causal_conv1d") is not None


def _use_triton(backend: str, x: Tensor) -> bool:
    if backend not in ("auto", "torch", "triton"):
        raise ValueError(f"backend must be auto, torch or triton, not {backend!r}")
    return backend == "triton" or (backend == "auto" and x.is_cuda and triton_kernels_available())


def padding_mask(lengths_B: Tensor, length: int) -> Tensor:
    """(B, L) bool, True on real tokens."""
    return torch.arange(length, device=lengths_B.device)[None, :] < lengths_B[:, None]


def causal_conv(
    x_BLC: Tensor,
    weight_CK: Tensor,
    bias_C: Tensor | None,
    *,
    initial_BCK: Tensor | None = None,
    seq_idx_BL: Tensor | None = None,
    lengths_B: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Depthwise causal convolution followed by SiLU.

    Args:
        x_BLC: inputs.  weight_CK, bias_C: one filter of K taps a channel.
        initial_BCK: the last K-1 inputs before this call, (B, C, K-1); zeros when None.
        seq_idx_BL: document number of each token (see module docstring).
        lengths_B: real tokens a row.

    Returns:
        y (B, L, C) in x's dtype, and the new window (B, C, K-1) in fp32, gathered at each row's own end.
    """
    batch, length, channels = x_BLC.shape
    width = weight_CK.shape[1]
    if initial_BCK is None:
        head = x_BLC.new_zeros(batch, width - 1, channels)
    else:
        head = initial_BCK.transpose(1, 2).to(x_BLC.dtype)
    full = torch.cat([head, x_BLC], dim=1)  # (B, K-1+L, C)

    ends = torch.full((batch,), length, device=x_BLC.device) if lengths_B is None else lengths_B
    columns = ends[:, None] + torch.arange(width - 1, device=x_BLC.device)[None, :]
    window = full.detach() if not torch.is_grad_enabled() else full
    window = window.gather(1, columns[:, :, None].expand(-1, -1, channels))
    if seq_idx_BL is not None:
        # Only inputs of the row's last document belong to its window.
        last = seq_idx_BL.gather(1, (ends - 1).clamp(min=0)[:, None])
        idx = torch.cat([seq_idx_BL[:, :1].expand(-1, width - 1), seq_idx_BL], dim=1)
        window = window * (idx.gather(1, columns) == last)[:, :, None]
    final_BCK = window.transpose(1, 2).float()

    if _use_triton(backend, x_BLC) and x_BLC.is_cuda and conv_kernel_available():
        from causal_conv1d import causal_conv1d_fn

        if seq_idx_BL is None:
            y = causal_conv1d_fn(full.transpose(1, 2), weight_CK, bias_C, activation="silu")
            return y.transpose(1, 2)[:, width - 1 :], final_BCK
        if initial_BCK is None:  # the kernel refuses initial states together with seq_idx
            channel_last = x_BLC.contiguous().transpose(1, 2)
            y = causal_conv1d_fn(channel_last, weight_CK, bias_C, seq_idx=seq_idx_BL.int(), activation="silu")
            return y.transpose(1, 2), final_BCK

    same_KBL = None
    if seq_idx_BL is not None:
        idx = torch.cat([seq_idx_BL[:, :1].expand(-1, width - 1), seq_idx_BL], dim=1)
        # same[j][b, l]: the input j+1 positions back lies in the same document.
        same_KBL = [idx[:, width - 2 - j : width - 2 - j + length] == seq_idx_BL for j in range(width - 1)]
    return ShiftedConvSiLU.apply(full, weight_CK, bias_C, same_KBL), final_BCK


class ShiftedConvSiLU(torch.autograd.Function):
    """K shifted multiply-adds in channel-last layout, SiLU fused; no transposes, no per-tap autograd nodes."""

    @staticmethod
    def forward(ctx, full_BMC: Tensor, weight_CK: Tensor, bias_C: Tensor | None, same_KBL):
        width = weight_CK.shape[1]
        pre = _shifted_taps(full_BMC, weight_CK.to(full_BMC.dtype), same_KBL)
        if bias_C is not None:
            pre += bias_C.to(pre.dtype)
        ctx.save_for_backward(full_BMC, weight_CK, pre)
        ctx.same_KBL, ctx.width, ctx.bias_dtype = same_KBL, width, None if bias_C is None else bias_C.dtype
        return F.silu(pre)

    @staticmethod
    def backward(ctx, grad_BLC: Tensor):
        full, weight_CK, pre = ctx.saved_tensors
        same_KBL, width = ctx.same_KBL, ctx.width
        length = grad_BLC.shape[1]
        grad_pre = torch.ops.aten.silu_backward(grad_BLC, pre)
        grad_full = grad_weight = grad_bias = None
        taps = [grad_pre]
        for j in range(width - 1):
            taps.append(grad_pre if same_KBL is None else grad_pre * same_KBL[j][:, :, None])
        if ctx.needs_input_grad[0]:
            weight = weight_CK.to(grad_pre.dtype)
            grad_full = torch.zeros_like(full)
            for back, tap in enumerate(taps):
                k = width - 1 - back
                grad_full[:, k : k + length].addcmul_(tap, weight[:, k])
        if ctx.needs_input_grad[1]:
            columns = [(taps[width - 1 - k] * full[:, k : k + length]).sum((0, 1)) for k in range(width)]
            grad_weight = torch.stack(columns, dim=1).to(weight_CK.dtype)
        if ctx.bias_dtype is not None and ctx.needs_input_grad[2]:
            grad_bias = grad_pre.sum((0, 1)).to(ctx.bias_dtype)
        return grad_full, grad_weight, grad_bias, None


def _shifted_taps(full_BMC: Tensor, weight_CK: Tensor, same_KBL) -> Tensor:
    width = weight_CK.shape[1]
    length = full_BMC.shape[1] - width + 1
    out = full_BMC[:, width - 1 :] * weight_CK[:, width - 1]
    for j in range(width - 1):
        k = width - 2 - j
        shifted = full_BMC[:, k : k + length]
        if same_KBL is not None:
            shifted = shifted * same_KBL[j][:, :, None]
        out.addcmul_(shifted, weight_CK[:, k])
    return out


def chunk_scan(
    x_BLHP: Tensor,
    dt_BLH: Tensor,
    A_H: Tensor,
    B_BLGN: Tensor,
    C_BLGN: Tensor,
    D_H: Tensor,
    dt_bias_H: Tensor,
    *,
    chunk_size: int,
    initial_states_BHPN: Tensor | None = None,
    seq_idx_BL: Tensor | None = None,
    lengths_B: Tensor | None = None,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """The selective state-space recurrence ``h = exp(dt A) h + dt B x``, ``y = C h + D x`` in chunks.

    Args:
        x_BLHP, B_BLGN, C_BLGN: inputs in the compute dtype; B and C are shared by the H/G heads of a group.
        dt_BLH: step sizes before bias and softplus.  A_H: negative decay rates.  D_H: skip weights.
        initial_states_BHPN: fp32 state before the first token (zeros when None).

    Returns:
        y (B, L, H, P) in x's dtype and the final state (B, H, P, N), fp32: after the row's last real token, or of
        its last document when ``seq_idx`` is given.

    Raises:
        ValueError: heads not divisible by groups, or an unknown backend.
    """
    length, heads = x_BLHP.shape[1:3]
    groups = B_BLGN.shape[2]
    if heads % groups:
        raise ValueError(f"{heads} heads cannot share {groups} groups of B and C")
    if lengths_B is not None:
        # softplus(-1e4) = 0: pads neither decay nor feed the state.
        dt_BLH = dt_BLH.masked_fill(~padding_mask(lengths_B, length)[:, :, None], -1e4)
    if _use_triton(backend, x_BLHP):
        return _triton_scan(
            x_BLHP, dt_BLH, A_H, B_BLGN, C_BLGN, D_H, dt_bias_H, chunk_size, initial_states_BHPN, seq_idx_BL, dt_limit
        )

    with torch.autocast(x_BLHP.device.type, enabled=False):  # decays and states stay fp32
        return _torch_scan(
            x_BLHP, dt_BLH, A_H, B_BLGN, C_BLGN, D_H, dt_bias_H, chunk_size, initial_states_BHPN, seq_idx_BL, dt_limit
        )


def _torch_scan(x_BLHP, dt_BLH, A_H, B_BLGN, C_BLGN, D_H, dt_bias_H, chunk_size, initial_states_BHPN, seq_idx_BL, dt_limit):
    batch, length, heads, dim = x_BLHP.shape
    state = B_BLGN.shape[3]
    dt = F.softplus(dt_BLH.float() + dt_bias_H.float()).clamp(*dt_limit)
    if initial_states_BHPN is None:
        initial_states_BHPN = x_BLHP.new_zeros(batch, heads, dim, state, dtype=torch.float32)
    states = initial_states_BHPN.float()
    if length == 0:
        return x_BLHP, states
    span, ys = _SPAN_CHUNKS * chunk_size, []
    previous_idx = None if seq_idx_BL is None else seq_idx_BL[:, 0]
    for start in range(0, length, span):
        cut = slice(start, start + span)
        idx = None if seq_idx_BL is None else seq_idx_BL[:, cut]
        y, states = _span_scan(
            x_BLHP[:, cut], dt[:, cut], A_H, B_BLGN[:, cut], C_BLGN[:, cut], states, previous_idx, idx, chunk_size
        )
        previous_idx = None if idx is None else idx[:, -1]
        ys.append(y)
    y = ys[0] if len(ys) == 1 else torch.cat(ys, dim=1)
    return torch.addcmul(y, x_BLHP, D_H.to(x_BLHP.dtype)[:, None]), states


def _span_scan(x_BLHP, dt_BLH, A_H, B_BLGN, C_BLGN, initial_BHPN, previous_idx_B, seq_idx_BL, chunk_size):
    """One span of at most ``_SPAN_CHUNKS`` chunks; dt is positive and final here.  Without the D term."""
    batch, length, heads, dim = x_BLHP.shape
    groups, state = B_BLGN.shape[2:]
    per_group, dtype = heads // groups, x_BLHP.dtype
    chunk = min(chunk_size, length)
    pad = -length % chunk
    if pad:
        # dt = 0 on the pads: they leave the state alone.
        x_BLHP, B_BLGN, C_BLGN = (F.pad(t, (0, 0, 0, 0, 0, pad)) for t in (x_BLHP, B_BLGN, C_BLGN))
        dt_BLH = F.pad(dt_BLH, (0, 0, 0, pad))
        if seq_idx_BL is not None:
            seq_idx_BL = torch.cat([seq_idx_BL, seq_idx_BL[:, -1:].expand(-1, pad)], dim=1)
    chunks = (length + pad) // chunk
    dt_BZQH = dt_BLH.view(batch, chunks, chunk, heads)
    cum_BZQH = (dt_BZQH * A_H.float()).cumsum(2)
    u_BZQHP = (x_BLHP * dt_BLH.to(dtype)[..., None]).view(batch, chunks, chunk, heads, dim)
    B_BZQGN = B_BLGN.reshape(batch, chunks, chunk, groups, state)
    C_BZQGN = C_BLGN.reshape(batch, chunks, chunk, groups, state)
    idx_BZQ = None if seq_idx_BL is None else seq_idx_BL.view(batch, chunks, chunk)

    # 1. Inside a chunk: (C B^T * decay) u, the quadratic form; scores C B^T exist once per group.
    y_BZQHP = intra_chunk(u_BZQHP, cum_BZQH, B_BZQGN, C_BZQGN, idx_BZQ)

    # 2. What each chunk adds to the state: one (heads x P, Q) by (Q, N) product per group.
    to_end = torch.exp(cum_BZQH[:, :, -1:] - cum_BZQH)
    if idx_BZQ is not None:
        to_end = to_end * (idx_BZQ == idx_BZQ[:, :, -1:])[..., None]
    weighted = (u_BZQHP * to_end.to(dtype)[..., None]).view(batch, chunks, chunk, groups, per_group * dim)
    added = torch.matmul(weighted.permute(0, 1, 3, 4, 2), B_BZQGN.transpose(2, 3))  # (B, Z, G, HgP, N)
    added_BZHPN = added.float().view(batch, chunks, heads, dim, state)

    # 3. Across chunks: the state entering chunk c is a decayed sum of the initial state and earlier chunks.
    log_HZ = cum_BZQH[:, :, -1].transpose(1, 2)  # (B, H, Z), log decay over a whole chunk
    upto = F.pad(log_HZ.cumsum(2), (1, 0))  # (B, H, Z+1)
    log_decay = upto[:, :, :, None] - upto[:, :, None, :]  # row: entering chunk c (Z = final), column: source z
    keep = torch.ones(chunks + 1, chunks + 1, dtype=torch.bool, device=x_BLHP.device).tril()
    if idx_BZQ is not None:
        ends = torch.cat([previous_idx_B[:, None], idx_BZQ[:, :, -1]], dim=1)  # (B, Z+1)
        keep = keep & (ends[:, :, None] == ends[:, None, :])[:, None]
    decay = torch.exp(log_decay.masked_fill(~keep, -torch.inf))
    sources = torch.cat([initial_BHPN[:, None], added_BZHPN], dim=1).transpose(1, 2).flatten(3)  # (B, H, Z+1, PN)
    entering = torch.matmul(decay, sources).view(batch, heads, chunks + 1, dim, state)
    final_BHPN = entering[:, :, -1]

    # 4. What the entering state contributes: one (Q, N) by (N, heads x P) product per group.
    entering = entering[:, :, :-1].transpose(1, 2).reshape(batch, chunks, groups, per_group * dim, state).to(dtype)
    carried = torch.matmul(C_BZQGN.transpose(2, 3), entering.transpose(3, 4))  # (B, Z, G, Q, HgP)
    carried = carried.transpose(2, 3).reshape(batch, chunks, chunk, heads, dim)
    from_start = torch.exp(cum_BZQH)
    if idx_BZQ is not None:
        from_start = from_start * (idx_BZQ == ends[:, :-1, None])[..., None]
    y = torch.addcmul(y_BZQHP, carried, from_start.to(dtype)[..., None])
    return y.reshape(batch, length + pad, heads, dim)[:, :length], final_BHPN


def _triton_scan(x, dt, A, B, C, D, dt_bias, chunk_size, initial, seq_idx, dt_limit):
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

    y, final = mamba_chunk_scan_combined(
        x.contiguous(), dt.contiguous(), A.float(), B.contiguous(), C.contiguous(), chunk_size,
        D=D.float(), dt_bias=dt_bias.float(), dt_softplus=True, dt_limit=dt_limit,
        initial_states=initial,
        seq_idx=None if seq_idx is None else seq_idx.int().contiguous(), return_final_states=True,
    )  # fmt: skip
    return y, final.float()


def state_update(
    state_BHPN: Tensor,
    x_BHP: Tensor,
    dt_BH: Tensor,
    A_H: Tensor,
    B_BGN: Tensor,
    C_BGN: Tensor,
    D_H: Tensor,
    dt_bias_H: Tensor,
    *,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    backend: str = "auto",
) -> Tensor:
    """One token: updates the fp32 ``state_BHPN`` in place and returns y (B, H, P) in x's dtype."""
    batch, heads, dim = x_BHP.shape
    groups, state = B_BGN.shape[1:]
    if _use_triton(backend, x_BHP) and dt_limit == (0.0, float("inf")):
        from mamba_ssm.ops.triton.selective_state_update import selective_state_update

        return selective_state_update(
            state_BHPN, x_BHP, dt_BH[..., None].expand(-1, -1, dim), A_H.float()[:, None, None].expand(-1, dim, state),
            B_BGN, C_BGN, D_H.float()[:, None].expand(-1, dim),
            dt_bias=dt_bias_H.float()[:, None].expand(-1, dim), dt_softplus=True,
        )  # fmt: skip
    dt = F.softplus(dt_BH.float() + dt_bias_H.float()).clamp(*dt_limit)
    u_BGHP = (x_BHP.float() * dt[..., None]).view(batch, groups, -1, dim)
    state_BHPN.mul_(torch.exp(dt * A_H.float())[..., None, None])
    grouped = state_BHPN.view(batch, groups, heads // groups, dim, state)
    grouped.addcmul_(u_BGHP[..., None], B_BGN.float()[:, :, None, None, :])
    y = torch.matmul(grouped, C_BGN.float()[:, :, None, :, None]).reshape(batch, heads, dim)
    return (y + x_BHP.float() * D_H.float()[:, None]).to(x_BHP.dtype)
