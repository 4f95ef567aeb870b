"""A session's state as bytes: bit-exact, deterministic, refused by any other model."""

import hashlib
import json
import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from inference.generator import Sessions
from inference.model import MambaPolicy, RecurrentStates, TransformerPolicy, load_model
from inference.model.policy import HistoryStates
from inference.state_blob import FORMAT, dump_state, load_state, state_hash
from tests.tiny_models import tiny_mamba, tiny_transformer_directory

HASH = "0" * 64


@pytest.fixture(scope="module")
def mamba():
    return MambaPolicy(tiny_mamba())


@pytest.fixture(scope="module")
def transformer(tmp_path_factory):
    return TransformerPolicy(
        load_model(tiny_transformer_directory(tmp_path_factory.mktemp("model") / "llama", vocab_size=128))
    )


def row_after(policy, token_ids, next_id=7, started=True):
    """A session that has read some tokens."""
    _, states = policy.feed(policy.new_states(1), [token_ids])
    return Sessions(states, [next_id], [started])


def bits(tensor):
    return tensor.view(torch.int32)


def relabelled(blob, **changes):
    """The blob with other metadata."""
    size = int.from_bytes(blob[:8], "little")
    header = json.loads(blob[8 : 8 + size])
    about = json.loads(header["__metadata__"]["state"]) | changes
    header["__metadata__"] = {"state": json.dumps(about)}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + blob[8 + size :]


def test_a_restored_mamba_session_goes_on_bit_for_bit(mamba):
    row = row_after(mamba, [5, 6, 7, 8])
    again = load_state(dump_state(row, HASH), mamba, HASH)
    assert torch.equal(again.states.conv_ESCK, row.states.conv_ESCK)
    assert torch.equal(again.states.ssm_ESHPN, row.states.ssm_ESHPN)
    assert (again.next_id, again.started) == ([7], [True])
    for one, other in zip(mamba.feed(row.states, [[9, 1]]), mamba.feed(again.states, [[9, 1]]), strict=True):
        if isinstance(one, RecurrentStates):
            one, other = one.ssm_ESHPN, other.ssm_ESHPN
        assert torch.equal(one, other)


def test_a_restored_transformer_session_has_read_the_same_tokens(transformer):
    row = row_after(transformer, [5, 6, 7, 8])
    again = load_state(dump_state(row, HASH), transformer, HASH)
    assert again.states.histories == [[5, 6, 7, 8]] and again.states.cache is None
    fresh = transformer.feed(HistoryStates([[5, 6, 7, 8]]), [[9]])[0]
    assert torch.equal(transformer.feed(again.states, [[9]])[0], fresh)


def test_fresh_sessions_are_stored_too(mamba, transformer):
    for policy in (mamba, transformer):
        row = Sessions(policy.new_states(1), [1], [False])
        again = load_state(dump_state(row, HASH), policy, HASH)
        assert (again.next_id, again.started, len(again.states)) == ([1], [False], 1)


@given(next_id=st.integers(1, 2**40), pattern=st.binary(min_size=64, max_size=64))
def test_any_bit_pattern_survives(mamba, next_id, pattern):
    """NaNs with payload, negative zero, denormals: values are never looked at."""
    states = mamba.new_states(1)
    states.ssm_ESHPN.flatten()[:16] = torch.frombuffer(bytearray(pattern), dtype=torch.float32)
    row = Sessions(states, [next_id], [True])
    blob = dump_state(row, HASH)
    again = load_state(blob, mamba, HASH)
    assert torch.equal(bits(again.states.ssm_ESHPN), bits(states.ssm_ESHPN)) and again.next_id == [next_id]
    assert dump_state(again, HASH) == blob and state_hash(dump_state(again, HASH)) == state_hash(blob)


def test_rows_out_of_a_batch_are_the_bytes_of_the_row_alone(mamba):
    one, two = row_after(mamba, [5, 6]), row_after(mamba, [9], next_id=2)
    both = Sessions.cat([one, two])
    assert [dump_state(both.select([i]), HASH) for i in (0, 1)] == [
        dump_state(one, HASH),
        dump_state(two, HASH),
    ]
    with pytest.raises(ValueError, match="one session, got 2"):
        dump_state(both, HASH)


def test_the_hash_is_of_the_content_as_documented(transformer):
    """sha256(metadata JSON ‖ JSON of [name, type, shape] ‖ values), written out here for three tokens."""
    row = Sessions(HistoryStates([[5, 6, 300]]), [4], [True])
    about = {
        "format": FORMAT,
        "kind": "history",
        "generator": HASH,
        "fields": {"next_id": 4, "started": True},
    }
    expected = hashlib.sha256(json.dumps(about, sort_keys=True).encode())
    expected.update(b'["tokens", "torch.int64", [3]]' + struct.pack("<3q", 5, 6, 300))
    assert state_hash(dump_state(row, HASH)) == expected.hexdigest()


def test_the_hash_does_not_depend_on_the_layout_but_on_every_bit(mamba):
    blob = dump_state(row_after(mamba, [5, 6, 7]), HASH)
    other_layout = relabelled(blob)
    assert other_layout != blob and state_hash(other_layout) == state_hash(blob)
    flipped = bytearray(blob)
    flipped[-1] ^= 1
    assert state_hash(bytes(flipped)) != state_hash(blob)
    assert state_hash(relabelled(blob, fields={"next_id": 8, "started": True})) != state_hash(blob)


def test_the_state_of_another_model_is_refused_with_what_differs(mamba, transformer):
    blob = dump_state(row_after(mamba, [5, 6]), HASH)
    with pytest.raises(
        ValueError, match=f"another generator: its generator's hash is '{HASH}', this one's is 'f00'"
    ):
        load_state(blob, mamba, "f00")
    with pytest.raises(ValueError, match="kind 'recurrent', this generator's states are 'history'"):
        load_state(blob, transformer, HASH)
    wider = MambaPolicy(tiny_mamba(state_size=32))
    with pytest.raises(
        ValueError, match=r"ssm is torch.float32 \(2, 1, 4, 16, 16\), this model's is .*\(2, 1, 4, 16, 32\)"
    ):
        load_state(blob, wider, HASH)
    history = dump_state(Sessions(HistoryStates([[5, 5000]]), [1], [True]), HASH)
    with pytest.raises(ValueError, match="read token 5000, this model's vocabulary has 128 rows"):
        load_state(history, transformer, HASH)


def test_other_versions_and_damaged_bytes_are_refused(mamba):
    blob = dump_state(row_after(mamba, [5, 6]), HASH)
    with pytest.raises(ValueError, match=r"format 'states/9', this version reads"):
        load_state(relabelled(blob, format="states/9"), mamba, HASH)
    with pytest.raises(ValueError, match=r"has the fields \['next_id'\], this version wants"):
        load_state(relabelled(blob, fields={"next_id": 1}), mamba, HASH)
    for damaged in (
        b"",
        b"\x80\x04",
        blob[:100],
        blob[:-1],
        b"\xff" * 8 + blob[8:],
        relabelled(blob, kind="history"),
    ):
        with pytest.raises(ValueError, match="damaged session state"):
            load_state(damaged, mamba, HASH)


def test_states_of_unknown_kind_are_refused():
    with pytest.raises(ValueError, match="states of kind dict have no form on disk"):
        dump_state(Sessions({}, [1], [True]), HASH)
