"""The PyTorch scan against mamba-ssm's Triton kernels, called as a GPU run calls them (`backend="triton"`).

In: random inputs of tiny shapes. Both backends of inference/model/scan.py get the same tensors; outputs, final
states and the gradients of every input must agree to 1e-3 in fp32 (they agree to about 1e-5). The kernels run
in Triton's CPU interpreter, so this needs `make parity`, not a GPU.

Legend: B batch, L tokens, H heads, P head dim, G groups, N state, C conv channels, K conv width.
"""

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.parity import triton_interpreter

reason = triton_interpreter.missing()
if reason:
    pytest.skip(reason, allow_module_level=True)
triton_interpreter.enable()

from inference.model.scan import causal_conv, chunk_scan, state_update  # noqa: E402

# The kernels' sigmoid overflows to its right limit where a pad's dt is -1e4; on a GPU nobody says so.
pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore:overflow encountered in exp")]

TOLERANCE = 1e-3
HEADS, HEAD_DIM, STATE, CHUNK = 4, 16, 16, 16


@dataclass
class Inputs:
    """Arguments of `chunk_scan`: x BLHP, dt BLH, A H, B and C BLGN, D H, dt_bias H, states BHPN."""

    x: Tensor
    dt: Tensor
    A: Tensor
    B: Tensor
    C: Tensor
    D: Tensor
    dt_bias: Tensor
    states: Tensor

    def leaves(self) -> list[Tensor]:
        return list(vars(self).values())

    def cut(self, rows: slice, tokens: slice, states: Tensor) -> "Inputs":
        along = {name: getattr(self, name)[rows, tokens] for name in ("x", "dt", "B", "C")}
        return Inputs(**{**vars(self), **along, "states": states})


def make_inputs(length: int, groups: int = 2, batch: int = 2, seed: int = 0) -> Inputs:
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g)

    return Inputs(
        x=normal(batch, length, HEADS, HEAD_DIM),
        dt=normal(batch, length, HEADS),
        A=-torch.rand(HEADS, generator=g) - 0.1,
        B=normal(batch, length, groups, STATE),
        C=normal(batch, length, groups, STATE),
        D=normal(HEADS),
        dt_bias=normal(HEADS),
        states=normal(batch, HEADS, HEAD_DIM, STATE),
    )


def scan(inputs: Inputs, backend: str, carried: bool = True, **options: object) -> tuple[Tensor, Tensor]:
    """`chunk_scan` of `inputs`; from their state when `carried`, else from zero."""
    *arguments, states = inputs.leaves()
    return chunk_scan(
        *arguments,
        chunk_size=CHUNK,
        initial_states_BHPN=states if carried else None,
        backend=backend,
        **options,
    )


def assert_close(ours: Tensor, kernel: Tensor, what: str) -> None:
    difference = (ours - kernel).abs().max().item()
    assert ours.shape == kernel.shape and difference <= TOLERANCE, f"{what}: {difference:.1e}"


# Borders inside a chunk, on a chunk's border (16, 32) and in the last, incomplete chunk; row 2 starts at 4.
SEQ_IDX = torch.tensor([[0] * 7 + [1] * 20 + [2] * 11 + [3] * 3, [4] * 16 + [5] * 16 + [7] * 9])
CASES = {
    "from zero": {"carried": False},
    "initial states": {"carried": True},
    "seq_idx": {"carried": False, "seq_idx_BL": SEQ_IDX},
    "initial states and seq_idx": {"carried": True, "seq_idx_BL": SEQ_IDX},
    "ragged rows": {"carried": True, "lengths_B": torch.tensor([41, 3])},
    "clamped dt": {"carried": True, "dt_limit": (0.05, 0.4)},
}


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_outputs_states_and_gradients_agree(case: str, groups: int) -> None:
    """L = 41 is two and a half chunks; random weights make every output and state entry count in the gradient."""
    inputs, options = make_inputs(SEQ_IDX.shape[1], groups), CASES[case]
    lengths = options.get("lengths_B", torch.tensor([41, 41]))
    real = (torch.arange(41) < lengths[:, None])[:, :, None, None]
    g = torch.Generator().manual_seed(1)
    weight_y = torch.randn(inputs.x.shape, generator=g) * real
    weight_state = torch.randn(inputs.states.shape, generator=g)
    results = {}
    for backend in ("torch", "triton"):
        leaves = [leaf.clone().requires_grad_() for leaf in inputs.leaves()]
        y, final = scan(Inputs(*leaves), backend, **options)
        loss = (y * weight_y).sum() + (final * weight_state).sum()
        used = leaves if options["carried"] else leaves[:-1]
        results[backend] = [y * real, final, *torch.autograd.grad(loss, used)]
    assert results["torch"][1].dtype == results["triton"][1].dtype == torch.float32
    names = ["y", "final state", *(f"gradient of {name}" for name in vars(inputs))]
    for name, ours, kernel in zip(names, results["torch"], results["triton"], strict=False):
        assert_close(ours, kernel, name)


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17])
def test_short_turns_agree(length: int) -> None:
    """A turn may be one token, and any length around a chunk's."""
    inputs = make_inputs(length)
    for ours, kernel, what in zip(scan(inputs, "torch"), scan(inputs, "triton"), ("y", "state"), strict=True):
        assert_close(ours, kernel, what)


def test_turns_through_the_kernels_equal_one_torch_pass() -> None:
    """Prefill of 19 tokens, prefill of 7 from its state, then 4 single tokens, against one scan of 30."""
    inputs = make_inputs(30)
    y_full, final_full = scan(inputs, "torch")
    every, states, outputs = slice(None), inputs.states, []
    for tokens in (slice(0, 19), slice(19, 26)):
        y, states = scan(inputs.cut(every, tokens, states), "triton")
        outputs.append(y)
    for t in range(26, 30):
        x, dt, A, B, C, D, dt_bias, states = inputs.cut(every, slice(t, t + 1), states).leaves()
        outputs.append(
            state_update(states, x[:, 0], dt[:, 0], A, B[:, 0], C[:, 0], D, dt_bias, backend="triton")[
                :, None
            ]
        )
    assert_close(y_full, torch.cat(outputs, dim=1), "y")
    assert_close(final_full, states, "state")


@pytest.mark.parametrize("groups", [1, 2])
def test_state_update_agrees_and_writes_in_place(groups: int) -> None:
    x, dt, A, B, C, D, dt_bias, states = make_inputs(1, groups, batch=3).leaves()
    results = {}
    for backend in ("torch", "triton"):
        state = states.clone()
        y = state_update(state, x[:, 0], dt[:, 0], A, B[:, 0], C[:, 0], D, dt_bias, backend=backend)
        results[backend] = (y, state)
    assert (results["torch"][1] - states).abs().max() > 0.1, "the state was not written in place"
    for ours, kernel, what in zip(results["torch"], results["triton"], ("y", "state"), strict=True):
        assert_close(ours, kernel, what)


def test_packed_convolution_and_scan_equal_each_document_alone_through_the_kernel() -> None:
    """Three in one row through our convolution and scan, each alone through F.conv1d and the kernel."""
    sizes, width, groups = (2, 19, 10), 4, 2
    parts = [HEADS * HEAD_DIM, groups * STATE, groups * STATE]
    inputs = make_inputs(sum(sizes), groups, batch=1)
    g = torch.Generator().manual_seed(2)
    xBC_BLC = torch.randn(1, sum(sizes), sum(parts), generator=g)
    weight_CK, bias_C = torch.randn(sum(parts), width, generator=g), torch.randn(sum(parts), generator=g)

    def filled(mixed_BLC: Tensor, dt: Tensor) -> Inputs:
        x, B, C = mixed_BLC.split(parts, dim=-1)
        heads, shared = (1, -1, HEADS, HEAD_DIM), (1, -1, groups, STATE)
        return Inputs(
            **{**vars(inputs), "x": x.view(heads), "B": B.view(shared), "C": C.view(shared), "dt": dt}
        )

    seq_idx = torch.repeat_interleave(torch.arange(3), torch.tensor(sizes))[None]
    mixed, window = causal_conv(xBC_BLC, weight_CK, bias_C, seq_idx_BL=seq_idx)
    y, final = scan(filled(mixed, inputs.dt), "torch", carried=False, seq_idx_BL=seq_idx)
    assert torch.equal(window, xBC_BLC[:, -3:].transpose(1, 2))
    start = 0
    for size in sizes:
        document = slice(start, start + size)
        padded = F.pad(xBC_BLC[:, document].transpose(1, 2), (width - 1, 0))
        alone = F.silu(F.conv1d(padded, weight_CK[:, None], bias_C, groups=sum(parts))).transpose(1, 2)
        y_alone, final_alone = scan(filled(alone, inputs.dt[:, document]), "triton", carried=False)
        assert_close(y[:, document], y_alone, f"document at {start}")
        start += size
    assert_close(final, final_alone, "state of the last document")


def test_triton_backend_reaches_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without this a fall-back to PyTorch would compare PyTorch with itself."""
    from mamba_ssm.ops.triton import selective_state_update as update_module
    from mamba_ssm.ops.triton import ssd_combined

    def reached(*_: object, **__: object) -> None:
        raise InterruptedError("kernel")

    monkeypatch.setattr(ssd_combined, "mamba_chunk_scan_combined", reached)
    monkeypatch.setattr(update_module, "selective_state_update", reached)
    inputs = make_inputs(1)
    with pytest.raises(InterruptedError):
        scan(inputs, "triton")
    x, dt, A, B, C, D, dt_bias, states = inputs.leaves()
    with pytest.raises(InterruptedError):
        state_update(states, x[:, 0], dt[:, 0], A, B[:, 0], C[:, 0], D, dt_bias, backend="triton")


def test_the_bound_would_catch_a_lost_state_or_border() -> None:
    """Dropping the carried state, or one document border, moves the outputs a hundred times past the bound."""
    inputs = make_inputs(SEQ_IDX.shape[1])
    right, _ = scan(inputs, "triton", seq_idx_BL=SEQ_IDX - SEQ_IDX[:, :1])
    for wrong in (
        scan(inputs, "torch", carried=False, seq_idx_BL=SEQ_IDX)[0],
        scan(inputs, "torch", seq_idx_BL=SEQ_IDX.clamp(max=2))[0],
    ):
        assert (right - wrong).abs().max() > 100 * TOLERANCE
