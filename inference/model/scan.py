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

# Chunks whose states are passed on by one (count+1)^2 matrix product a head.
_BLOCK_CHUNKS = 12
# Longer rows are scanned span by span, which bounds memory.
_SPAN_TOKENS = 8192


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
    idx_BM = None
    if seq_idx_BL is not None:
        # Only inputs of the row's last document belong to its window; what came before the row is of its first.
        idx_BM = torch.cat([seq_idx_BL[:, :1].expand(-1, width - 1), seq_idx_BL], dim=1)
        last = seq_idx_BL.gather(1, (ends - 1).clamp(min=0)[:, None])
        window = window * (idx_BM.gather(1, columns) == last)[:, :, None]
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

    rows_R = same_RK = None
    if idx_BM is not None:
        rows_R, same_RK = _document_starts(idx_BM, width)
    with torch.autocast(x_BLC.device.type, enabled=False):
        return _ConvSiLU.apply(full, weight_CK, bias_C, rows_R, same_RK), final_BCK


def _document_starts(idx_BM: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Flat numbers (R,) of tokens whose window crosses a document border, and which taps they keep (R, K).

    ``idx_BM``: document number of each of the M = K-1+L inputs.
    """
    length = idx_BM.shape[1] - width + 1
    rows_R = (idx_BM[:, :length] != idx_BM[:, width - 1 :]).flatten().nonzero()[:, 0]
    taps = idx_BM.flatten()[_border_inputs(rows_R, length, width)]
    return rows_R, taps == taps[:, -1:]


class _ConvSiLU(torch.autograd.Function):
    """Dense depthwise convolution in channel-last layout, the few tokens behind a border corrected, SiLU.

    The backward pass of the channel-last kernel is fast for inputs and very slow for weights, so those are summed
    tap by tap.  Legend: M = L + K - 1 inputs, R border tokens.
    """

    @staticmethod
    def forward(ctx, full_BMC, weight_CK, bias_C, rows_R, same_RK):
        dtype = full_BMC.dtype
        channels, width = weight_CK.shape
        weight = weight_CK.to(dtype)
        image = full_BMC.transpose(1, 2)[:, :, None]
        bias = None if bias_C is None else bias_C.to(dtype)
        pre = (
            F.conv2d(image, weight[:, None, None], bias, groups=channels)[:, :, 0]
            .transpose(1, 2)
            .contiguous()
        )
        if rows_R is not None and len(rows_R):
            kept = _border_windows(full_BMC, rows_R, width) * same_RK[..., None]
            fixed = (kept * weight.t()).sum(1)
            pre.view(-1, channels)[rows_R] = fixed if bias is None else fixed + bias
        ctx.save_for_backward(full_BMC, weight_CK, pre, rows_R, same_RK)
        ctx.bias_dtype = None if bias_C is None else bias_C.dtype
        return F.silu(pre)

    @staticmethod
    def backward(ctx, grad_BLC):
        full, weight_CK, pre, rows_R, same_RK = ctx.saved_tensors
        channels, width = weight_CK.shape
        length = pre.shape[1]
        weight = weight_CK.to(pre.dtype)
        grad_pre = torch.ops.aten.silu_backward(grad_BLC.contiguous(), pre)
        grad_full = grad_weight = grad_bias = None
        if ctx.bias_dtype is not None and ctx.needs_input_grad[2]:
            grad_bias = grad_pre.sum((0, 1), dtype=torch.float32).to(ctx.bias_dtype)
        border = None
        if rows_R is not None and len(rows_R):
            flat = grad_pre.view(-1, channels)
            border = flat[rows_R][:, None] * same_RK[..., None]  # (R, K, C)
            flat[rows_R] = 0
        if ctx.needs_input_grad[0]:
            grad_full = torch.ops.aten.convolution_backward(
                grad_pre.transpose(1, 2)[:, :, None], full.transpose(1, 2)[:, :, None], weight[:, None, None],
                [channels], [1, 1], [0, 0], [1, 1], False, [0, 0], channels, [True, False, False],
            )[0][:, :, 0].transpose(1, 2)  # fmt: skip
            if border is not None:
                target = grad_full.contiguous()
                inputs = _border_inputs(rows_R, length, width)
                target.view(-1, channels).index_add_(0, inputs.flatten(), (border * weight.t()).flatten(0, 1))
                grad_full = target
        if ctx.needs_input_grad[1]:
            taps = [(grad_pre * full[:, k : k + length]).sum((0, 1)).float() for k in range(width)]
            if border is not None:
                windows = _border_windows(full, rows_R, width)
                taps = [tap + (border[:, k] * windows[:, k]).sum(0).float() for k, tap in enumerate(taps)]
            grad_weight = torch.stack(taps, dim=1).to(weight_CK.dtype)
        return grad_full, grad_weight, grad_bias, None, None


def _border_inputs(rows_R: Tensor, length: int, width: int) -> Tensor:
    """Flat positions (R, K) in the (B, M) inputs of the windows of flat outputs ``rows_R``."""
    first = rows_R + (rows_R // length) * (width - 1)
    return first[:, None] + torch.arange(width, device=rows_R.device)


def _border_windows(full_BMC: Tensor, rows_R: Tensor, width: int) -> Tensor:
    length = full_BMC.shape[1] - width + 1
    return full_BMC.reshape(-1, full_BMC.shape[2])[_border_inputs(rows_R, length, width)]


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
    scan = _triton_scan if _use_triton(backend, x_BLHP) else _torch_scan
    with torch.autocast(x_BLHP.device.type, enabled=False):  # decays and states stay fp32
        return scan(
            x_BLHP, dt_BLH, A_H, B_BLGN, C_BLGN, D_H, dt_bias_H, chunk_size, initial_states_BHPN, seq_idx_BL, dt_limit
        )  # fmt: skip


def _torch_scan(
    x_BLHP, dt_BLH, A_H, B_BLGN, C_BLGN, D_H, dt_bias_H, chunk_size, initial_states_BHPN, seq_idx_BL, dt_limit
):
    batch, length, heads, dim = x_BLHP.shape
    state = B_BLGN.shape[3]
    dt = F.softplus(dt_BLH.float() + dt_bias_H.float()).clamp(*dt_limit)
    if initial_states_BHPN is None:
        initial_states_BHPN = x_BLHP.new_zeros(batch, heads, dim, state, dtype=torch.float32)
    states = initial_states_BHPN.float()
    if length == 0:
        return x_BLHP, states
    span, ys = max(_SPAN_TOKENS // chunk_size, 1) * chunk_size, []
    parts = [t.split(span, dim=1) for t in (x_BLHP, dt, B_BLGN, C_BLGN)]
    previous_idx = None if seq_idx_BL is None else seq_idx_BL[:, 0]
    for i, (x, step, B, C) in enumerate(zip(*parts, strict=True)):
        idx = None if seq_idx_BL is None else seq_idx_BL[:, i * span : (i + 1) * span]
        y, states = _span_scan(x, step, A_H, B, C, states, previous_idx, idx, chunk_size)
        previous_idx = None if idx is None else idx[:, -1]
        ys.append(y)
    y = ys[0] if len(ys) == 1 else torch.cat(ys, dim=1)
    return torch.addcmul(y, x_BLHP, D_H.to(x_BLHP.dtype)[:, None]), states


def _span_scan(x_BLHP, dt_BLH, A_H, B_BLGN, C_BLGN, initial_BHPN, previous_idx_B, seq_idx_BL, chunk_size):
    """One span of at most ``_SPAN_TOKENS``; dt is positive and final here.  Without the D term."""
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
    ends_BZ = None
    if idx_BZQ is not None:
        ends_BZ = torch.cat([previous_idx_B[:, None], idx_BZQ[:, :, -1]], dim=1)  # (B, Z+1)
    entering, final_BHPN = _pass_states(cum_BZQH[:, :, -1], added_BZHPN, initial_BHPN, ends_BZ)

    # 4. What the entering state contributes: one (Q, N) by (N, heads x P) product per group.
    entering = entering.to(dtype).reshape(batch, chunks, groups, per_group * dim, state)
    carried = torch.matmul(C_BZQGN.transpose(2, 3), entering.transpose(3, 4))  # (B, Z, G, Q, HgP)
    carried = carried.transpose(2, 3).reshape(batch, chunks, chunk, heads, dim)
    from_start = torch.exp(cum_BZQH)
    if idx_BZQ is not None and ends_BZ is not None:
        from_start = from_start * (idx_BZQ == ends_BZ[:, :-1, None])[..., None]
    y = torch.addcmul(y_BZQHP, carried, from_start.to(dtype)[..., None])
    return y.reshape(batch, length + pad, heads, dim)[:, :length], final_BHPN


def _pass_states(log_BZH: Tensor, added_BZHPN: Tensor, initial_BHPN: Tensor, ends_BZ: Tensor | None):
    """States entering each chunk (B, Z, H, P, N) and the final one, all fp32.

    Blocks of chunks are one matrix product each; blocks follow one another.
    """
    if added_BZHPN.shape[1] == 1 and ends_BZ is None:  # a few new tokens: no product of matrices is needed
        kept = torch.exp(log_BZH[:, 0])[..., None, None]
        return initial_BHPN[:, None], torch.addcmul(added_BZHPN[:, 0], initial_BHPN, kept)
    shape = added_BZHPN.shape[2:]
    state, entering, start = initial_BHPN, [], 0
    # split, not slices: a slice's gradient is a zero tensor of the whole size.
    for log_BH, added in zip(
        log_BZH.split(_BLOCK_CHUNKS, 1), added_BZHPN.split(_BLOCK_CHUNKS, 1), strict=True
    ):
        count = added.shape[1]
        upto = F.pad(log_BH.transpose(1, 2).cumsum(2), (1, 0))  # (B, H, count+1)
        # Row c: entering chunk c of the block (last row: leaving it).  Column z: the state so far, then each chunk.
        keep = torch.ones(count + 1, count + 1, dtype=torch.bool, device=state.device).tril()
        if ends_BZ is not None:
            ends = ends_BZ[:, start : start + count + 1]
            keep = keep & (ends[:, :, None] == ends[:, None, :])[:, None]
        decay = torch.exp((upto[:, :, :, None] - upto[:, :, None, :]).masked_fill(~keep, -torch.inf))
        sources = torch.cat([state[:, None], added], dim=1).transpose(1, 2).flatten(3)
        out, left = torch.matmul(decay, sources).unflatten(3, shape[1:]).split([count, 1], dim=2)
        entering.append(out.transpose(1, 2))
        state, start = left.squeeze(2), start + count
    return torch.cat(entering, dim=1), state


def _triton_scan(x, dt, A, B, C, D, dt_bias, chunk_size, initial, seq_idx, dt_limit):
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

    y, final = mamba_chunk_scan_combined(
        x.contiguous(), dt.contiguous(), A.float(), B.contiguous(), C.contiguous(), chunk_size,
        D=D.float(), dt_bias=dt_bias.float(), dt_softplus=True, dt_limit=dt_limit,
        initial_states=initial,
        # The kernel gives the initial state to document number 0: count from each row's first document.
        seq_idx=None if seq_idx is None else (seq_idx - seq_idx[:, :1]).int().contiguous(), return_final_states=True,
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
    """One token of the recurrence of ``chunk_scan`` (same arguments, without the length axis).

    Returns:
        y (B, H, P) in x's dtype; ``state_BHPN`` (B, H, P, N), fp32, is updated in place.

    Raises:
        ValueError: an unknown backend.
    """
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
    with torch.autocast(
        x_BHP.device.type, enabled=False
    ):  # else the state would be read in the compute dtype
        y = torch.matmul(grouped, C_BGN.float()[:, :, None, :, None]).reshape(batch, heads, dim)
    return (y + x_BHP.float() * D_H.float()[:, None]).to(x_BHP.dtype)
