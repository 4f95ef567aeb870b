"""The recurrent state: carried, ragged, packed, forked, saved; and the scan against a plain loop."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from inference.model import MambaPolicy, RecurrentStates
from inference.model.scan import causal_conv, chunk_scan, state_update
from tests.tiny_models import logits, tiny_mamba


def recurrence(x, dt, A, B, C, D, bias, state, seq_idx):
    """h = exp(dt A) h + dt B x, y = C h + D x, token by token in fp64; B and C repeated per head."""
    repeat = x.shape[2] // B.shape[2]
    x, dt, A, B, C, D, bias, state = (t.double() for t in (x, dt, A, B, C, D, bias, state))
    B, C = B.repeat_interleave(repeat, 2), C.repeat_interleave(repeat, 2)
    dt = F.softplus(dt + bias)
    ys = []
    for t in range(x.shape[1]):
        if t and seq_idx is not None:
            state = state * (seq_idx[:, t] == seq_idx[:, t - 1])[:, None, None, None]
        u = torch.einsum("bhp,bhn->bhpn", x[:, t] * dt[:, t, :, None], B[:, t])
        state = state * torch.exp(dt[:, t] * A)[..., None, None] + u
        ys.append(torch.einsum("bhpn,bhn->bhp", state, C[:, t]) + D[:, None] * x[:, t])
    return torch.stack(ys, 1), state


def history(turns: list[list[int]]) -> list[int]:
    return [token for turn in turns for token in turn]


def scan_inputs(batch, length, heads=4, groups=2, dim=8, state=6, seed=0):
    g = torch.Generator().manual_seed(seed)
    rand = lambda *shape: torch.randn(*shape, generator=g)  # noqa: E731
    return (
        rand(batch, length, heads, dim), rand(batch, length, heads), -rand(heads).exp(),
        rand(batch, length, groups, state), rand(batch, length, groups, state), rand(heads), rand(heads),
    ), rand(batch, heads, dim, state)  # fmt: skip


@given(
    st.integers(1, 3),
    st.integers(1, 90),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([4, 16]),
    st.booleans(),
    st.booleans(),
)
def test_scan_is_the_recurrence(batch, length, groups, chunk, with_state, packed):
    args, state = scan_inputs(batch, length, groups=groups)
    seq_idx = None
    if packed:
        steps = torch.rand(batch, length, generator=torch.Generator().manual_seed(length)) < 0.2
        seq_idx = 3 + steps.long().cumsum(1)
    initial = state if with_state else None
    y, final = chunk_scan(*args, chunk_size=chunk, initial_states_BHPN=initial, seq_idx_BL=seq_idx)
    want_y, want_final = recurrence(*args, state if with_state else state * 0, seq_idx)
    torch.testing.assert_close(y.double(), want_y, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(final.double(), want_final, atol=2e-5, rtol=1e-4)
    assert final.dtype == torch.float32


def test_scan_gradients_are_those_of_the_recurrence():
    args, state = scan_inputs(2, 45)
    args = [a.double().requires_grad_() for a in args]
    seq_idx = (torch.arange(45) // 17).expand(2, -1)
    weight = torch.randn(2, 45, 4, 8, generator=torch.Generator().manual_seed(1)).double()
    y, final = recurrence(*args, state, seq_idx)
    want = torch.autograd.grad((y * weight).sum() + final.sum(), args)
    fp32 = [a.detach().float().requires_grad_() for a in args]
    y, final = chunk_scan(*fp32, chunk_size=8, initial_states_BHPN=state, seq_idx_BL=seq_idx)
    got = torch.autograd.grad((y * weight.float()).sum() + final.sum(), fp32)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.double(), b, atol=1e-4, rtol=1e-3)


def test_long_rows_are_scanned_in_spans_without_a_seam(monkeypatch):
    args, state = scan_inputs(1, 200)
    whole, final = chunk_scan(*args, chunk_size=8, initial_states_BHPN=state)
    monkeypatch.setattr("inference.model.scan._SPAN_TOKENS", 64)
    monkeypatch.setattr("inference.model.scan._BLOCK_CHUNKS", 3)
    parts, final_parts = chunk_scan(*args, chunk_size=8, initial_states_BHPN=state)
    torch.testing.assert_close(whole, parts, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(final, final_parts, atol=1e-5, rtol=1e-4)


def test_one_token_update_is_the_scan_of_one_token():
    args, state = scan_inputs(3, 1)
    want, final = chunk_scan(*args, chunk_size=8, initial_states_BHPN=state)
    x, dt, A, B, C, D, bias = args
    y = state_update(state, x[:, 0], dt[:, 0], A, B[:, 0], C[:, 0], D, bias)
    torch.testing.assert_close(y, want[:, 0], atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(state, final, atol=1e-6, rtol=1e-5)


def test_one_token_update_keeps_its_precision_under_autocast():
    args, state = scan_inputs(3, 1)
    x, dt, A, B, C, D, bias = args
    rest = (dt[:, 0], A, B[:, 0], C[:, 0], D, bias)
    want = state_update(state.clone(), x[:, 0], *rest)
    with torch.autocast("cpu", torch.bfloat16):
        got = state_update(state.clone(), x[:, 0], *rest)
        scanned, _ = chunk_scan(*args, chunk_size=8, initial_states_BHPN=state)
    assert torch.equal(got, want)
    torch.testing.assert_close(scanned[:, 0], want, atol=1e-6, rtol=1e-5)


def test_heads_must_share_groups_evenly():
    args, _ = scan_inputs(1, 4)
    with pytest.raises(ValueError, match="cannot share"):
        chunk_scan(
            args[0], args[1], args[2], args[3][:, :, [0, 0, 0]], args[4], args[5], args[6], chunk_size=4
        )


def test_convolution_gradients_agree_with_pytorchs():
    g = torch.Generator().manual_seed(0)
    x = torch.randn(2, 20, 6, generator=g, requires_grad=True)
    weight, bias = (
        torch.randn(6, 4, generator=g, requires_grad=True),
        torch.randn(6, generator=g, requires_grad=True),
    )
    seq_idx = torch.tensor([[0] * 7 + [1] * 1 + [2] * 12, [5] * 20])
    y, window = causal_conv(x, weight, bias, seq_idx_BL=seq_idx)
    pieces = []
    for row, cuts in ((0, [7, 1, 12]), (1, [20])):
        for part in x[row].split(cuts):
            pieces.append(
                F.silu(F.conv1d(F.pad(part.t()[None], (3, 0)), weight[:, None], bias, groups=6))[0].t()
            )
    want = torch.cat(pieces).view(2, 20, 6)
    torch.testing.assert_close(y, want)
    torch.testing.assert_close(window, x[:, -3:].transpose(1, 2))
    upstream = torch.randn(2, 20, 6, generator=g)
    got = torch.autograd.grad((y * upstream).sum(), (x, weight, bias))
    for a, b in zip(got, torch.autograd.grad((want * upstream).sum(), (x, weight, bias)), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_turns_of_any_length_equal_one_pass():
    model, lengths = tiny_mamba(), [1, 2, 3, 30, 300]
    ids = torch.randint(0, 128, (1, sum(lengths)), generator=torch.Generator().manual_seed(0))
    full, states, parts = logits(model, ids), None, []
    for turn in ids.split(lengths, dim=1):
        hidden, states = model.hidden(turn, states=states, return_states=True)
        parts.append(model.logits(hidden))
    assert (torch.cat(parts, 1) - full).abs().max() <= 1e-4
    assert full.abs().max() > 0.5  # the bound means something at this scale


@torch.no_grad()
def test_ragged_sessions_in_one_batch_equal_each_alone():
    model, g = tiny_mamba(), torch.Generator().manual_seed(0)
    policy, sessions, turns = MambaPolicy(model), 16, 5
    text = [[torch.randint(0, 128, (int(torch.randint(1, 41, (), generator=g)),), generator=g).tolist()
             for _ in range(turns)] for _ in range(sessions)]  # fmt: skip
    states = policy.new_states(sessions)
    worst = 0.0
    alone = []
    for rows in text:
        full = logits(model, torch.tensor([history(rows)]))[0]
        ends = torch.tensor([len(r) for r in rows]).cumsum(0) - 1
        alone.append(full[ends])
    for t in range(turns):
        out, states = policy.feed(states, [rows[t] for rows in text])
        worst = max(worst, max((out[i] - alone[i][t]).abs().max().item() for i in range(sessions)))
    assert worst <= 1e-4
    # The state is right too: one more token, stepped, against the full history.
    out, _ = policy.feed(states, [[7]] * sessions)
    for i, rows in enumerate(text):
        assert (out[i] - logits(model, torch.tensor([[*history(rows), 7]]))[0, -1]).abs().max() <= 1e-4


def test_packed_documents_do_not_see_each_other():
    model, lengths = tiny_mamba(), [5, 1, 2, 40, 77, 3, 60]
    ids = torch.randint(0, 128, (1, sum(lengths)), generator=torch.Generator().manual_seed(0))
    seq_idx = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None]
    weight = torch.randn(sum(lengths), 128, generator=torch.Generator().manual_seed(1))
    packed = logits(model, ids, seq_idx_BL=seq_idx)[0]
    (packed * weight).sum().backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    alone = torch.cat([logits(model, part)[0] for part in ids.split(lengths, dim=1)])
    (alone * weight).sum().backward()
    assert (packed - alone).abs().max() <= 1e-4
    for name, p in model.named_parameters():
        assert (p.grad - grads[name]).abs().max() <= 1e-4 * p.grad.abs().max(), name


@torch.no_grad()
def test_carried_state_belongs_to_the_first_packed_document():
    model, ids = tiny_mamba(), torch.randint(0, 128, (1, 30), generator=torch.Generator().manual_seed(0))
    _, states = model.hidden(ids[:, :10], return_states=True)
    seq_idx = torch.tensor([[4] * 8 + [5] * 12])
    packed, after = model.hidden(ids[:, 10:], seq_idx, states, return_states=True)
    first, _ = model.hidden(ids[:, 10:18], states=states)
    second, alone = model.hidden(ids[:, 18:], return_states=True)
    torch.testing.assert_close(packed, torch.cat([first, second], 1), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(after.ssm_ESHPN, alone.ssm_ESHPN, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(after.conv_ESCK, alone.conv_ESCK, atol=1e-5, rtol=1e-4)


def test_bad_rows_are_refused():
    model, ids = tiny_mamba(), torch.ones(2, 4, dtype=torch.long)
    with pytest.raises(ValueError, match=r"within 1\.\.4"):
        model.hidden(ids, lengths_B=torch.tensor([0, 4]))
    with pytest.raises(ValueError, match="not both"):
        model.hidden(ids, seq_idx_BL=ids, lengths_B=torch.tensor([1, 4]))
    with pytest.raises(ValueError, match="right padding"):
        model(ids, attention_mask=torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]]))


@torch.no_grad()
def test_slot_table(tmp_path):
    model, policy = tiny_mamba(), MambaPolicy(tiny_mamba())
    table = policy.new_states(5)
    _, batch = policy.feed(table.gather([3, 1]), [[5, 6, 7], [8]])
    table.scatter_([3, 1], batch)
    torch.testing.assert_close(table.gather([1]).ssm_ESHPN, batch.gather([1]).ssm_ESHPN)
    table.fork(3, [0, 4])
    assert torch.equal(table.ssm_ESHPN[:, 0], table.ssm_ESHPN[:, 3])
    out, _ = policy.feed(table.gather([0, 4, 3]), [[9]] * 3)
    torch.testing.assert_close(out[0], out[2])
    table.save(tmp_path / "slots.safetensors", note="five")
    loaded, meta = RecurrentStates.load(tmp_path / "slots.safetensors")
    assert meta == {"note": "five"} and torch.equal(loaded.ssm_ESHPN, table.ssm_ESHPN)
    assert torch.equal(loaded.conv_ESCK, table.conv_ESCK)
    table.reset_([3])
    assert table.ssm_ESHPN[:, 3].abs().sum() == 0 and table.ssm_ESHPN[:, 0].abs().sum() > 0
    fresh = policy.feed(table.gather([3]), [[1, 2]])[0]
    torch.testing.assert_close(fresh, logits(model, torch.tensor([[1, 2]]))[:, -1], atol=1e-5, rtol=1e-4)


def test_slot_table_refuses_nonsense(tmp_path):
    table = RecurrentStates.zeros(tiny_mamba().config, 3)
    with pytest.raises(IndexError, match=r"0\.\.2"):
        table.gather([3])
    with pytest.raises(ValueError, match="one distinct slot"):
        table.scatter_([1, 1], table.gather([0, 0]))
    with pytest.raises(FileNotFoundError, match="no recurrent states"):
        RecurrentStates.load(tmp_path / "none")
    (tmp_path / "cut").write_bytes(b"\x10\x00")
    with pytest.raises(ValueError, match="damaged"):
        RecurrentStates.load(tmp_path / "cut")


@torch.no_grad()
def test_states_stay_fp32_under_bf16_weights():
    model = tiny_mamba().to(torch.bfloat16)
    _, states = model.hidden(torch.ones(1, 9, dtype=torch.long), return_states=True)
    assert states.ssm_ESHPN.dtype == states.conv_ESCK.dtype == torch.float32
