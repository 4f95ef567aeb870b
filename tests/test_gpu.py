"""The GPU path: mamba-ssm's kernels on a CUDA device against the PyTorch scan on the CPU. Skipped without a GPU."""

from __future__ import annotations

import pytest
import torch

from inference.model import MambaPolicy
from inference.model.scan import chunk_scan, triton_kernels_available
from tests.test_model_states import scan_inputs
from tests.tiny_models import logits, tiny_mamba

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_scan_on_the_device_agrees_with_the_cpu(backend: str) -> None:
    if backend == "triton" and not triton_kernels_available():
        pytest.skip("mamba-ssm is not installed: pip install -e '.[gpu]'")
    args, state = scan_inputs(2, 150, heads=4, groups=2, dim=16, state=16)
    seq_idx = 2 + (torch.arange(150) // 40).expand(2, -1)
    want, final = chunk_scan(*args, chunk_size=16, initial_states_BHPN=state, seq_idx_BL=seq_idx)
    moved = [a.cuda() for a in args]
    got, got_final = chunk_scan(
        *moved,
        chunk_size=64,
        initial_states_BHPN=state.cuda(),
        seq_idx_BL=seq_idx.cuda(),
        backend=backend,
    )
    torch.testing.assert_close(got.cpu(), want, atol=2e-2, rtol=2e-2)  # the kernels multiply in TF32
    torch.testing.assert_close(got_final.cpu(), final, atol=2e-2, rtol=2e-2)


@torch.no_grad()
def test_turns_on_the_device_equal_one_pass() -> None:
    model = tiny_mamba(
        hidden_size=64, num_heads=8
    ).cuda()  # widths the convolution kernel takes: multiples of 8
    ids = torch.randint(0, 128, (1, 60), generator=torch.Generator().manual_seed(0)).cuda()
    policy = MambaPolicy(model)
    states = policy.new_states(1)
    for turn in ids[0].tolist()[:5], ids[0].tolist()[5:35], ids[0].tolist()[35:59], ids[0].tolist()[59:]:
        out, states = policy.feed(states, [turn])
    torch.testing.assert_close(out, logits(model, ids)[:, -1], atol=2e-2, rtol=2e-2)
    assert states.ssm_ESHPN.is_cuda and states.ssm_ESHPN.dtype == torch.float32
