"""A session's generator state as bytes: what h_t is on disk (CMT-RAG 3.4, C.3).

In:  one row of `inference.generator.Sessions` and the hash of the generator it belongs to.
Out: safetensors bytes (no pickle), and the same row again, bit by bit, on the policy's device.

The blob holds the policy's states and every per-row field of `Sessions` (next_id, started):
    kind "recurrent"   tensors conv (E, 1, C, K-1) and ssm (E, 1, H, P, N), fp32
    kind "history"     tensor tokens (M,), int64: a Transformer re-encodes its history, so keys and values stay out
and one metadata entry "state": {"format", "kind", "generator", "fields"} as JSON. One entry, because safetensors writes
several in no fixed order: so equal states are equal bytes.

Legend: E layers, C conv channels, K conv width, H heads, P head dim, N state, M tokens read so far.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from inference.generator import Policy, Sessions
from inference.model.policy import HistoryStates
from inference.model.states import RecurrentStates

FORMAT = "trace-memory-session-state/1"
_DAMAGED = "a damaged session state ({}); an earlier one has to be replayed"


def dump_state(row: Sessions, generator_hash: str) -> bytes:
    """One session as bytes. `generator_hash` names the generator (`inference.exports.source_hash`).

    Raises ValueError for any other number of rows than one, and for states of an unknown kind.
    """
    if len(row) != 1:
        raise ValueError(f"a state blob holds one session, got {len(row)}: dump row.select([i]) for each")
    kind, tensors = _tensors(row.states)
    about = {"format": FORMAT, "kind": kind, "generator": generator_hash, "fields": _fields(row)}
    return save(tensors, metadata={"state": json.dumps(about, sort_keys=True)})


def load_state(blob: bytes, policy: Policy, generator_hash: str) -> Sessions:
    """The session that `dump_state` wrote, on the device of the policy's own states.

    Raises ValueError, saying what differs, for the state of another generator, of another kind or shape, of another
    format version, and for damaged bytes.
    """
    about, tensors = _read(blob)
    fresh = policy.new_states(1)
    kind, expected = _tensors(fresh)
    differs = []
    if about["kind"] != kind:
        differs.append(f"it is of kind {about['kind']!r}, this generator's states are {kind!r}")
    elif kind == "recurrent":
        differs += [
            f"{name} is {tensors[name].dtype} {tuple(tensors[name].shape)}, this model's is "
            f"{expected[name].dtype} {tuple(expected[name].shape)}"
            for name in expected
            if (tensors[name].shape, tensors[name].dtype) != (expected[name].shape, expected[name].dtype)
        ]
    elif (largest := max(tensors["tokens"].tolist(), default=-1)) >= policy.vocab_size:
        differs.append(f"it has read token {largest}, this model's vocabulary has {policy.vocab_size} rows")
    if about["generator"] != generator_hash:
        differs.append(f"its generator's hash is {about['generator']!r}, this one's is {generator_hash!r}")
    if differs:
        raise ValueError(
            f"the stored state belongs to another generator: {'; '.join(differs)}. Open the session with the model "
            "that made it, or replay its questions into a new session"
        )
    fields = about["fields"]
    wanted = [field.name for field in dataclasses.fields(Sessions) if field.name != "states"]
    if sorted(fields) != sorted(wanted):
        raise ValueError(
            f"the stored state has the fields {sorted(fields)}, this version wants {sorted(wanted)}"
        )
    return Sessions(_states(fresh, tensors), **{name: [fields[name]] for name in wanted})


def state_hash(blob: bytes) -> str:
    """sha256 of what a blob says (metadata, tensor names, types, shapes, values), however the bytes are laid out.

    Raises ValueError for damaged bytes.
    """
    about, tensors = _read(blob)
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        digest.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()


# -- helpers ----------------------------------------------------------------------------------------------------


def _fields(row: Sessions) -> dict[str, Any]:
    names = [field.name for field in dataclasses.fields(row) if field.name != "states"]
    return {name: getattr(row, name)[0] for name in names}


def _tensors(states: Any) -> tuple[str, dict[str, torch.Tensor]]:
    """(kind, CPU tensors) of one row."""
    if isinstance(states, RecurrentStates):
        both = {"conv": states.conv_ESCK, "ssm": states.ssm_ESHPN}
        return "recurrent", {name: tensor.detach().cpu().contiguous() for name, tensor in both.items()}
    if isinstance(states, HistoryStates):
        return "history", {"tokens": torch.tensor(states.histories[0], dtype=torch.int64)}
    raise ValueError(f"states of kind {type(states).__name__} have no form on disk")


def _states(fresh: Any, tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(fresh, RecurrentStates):
        device = fresh.conv_ESCK.device
        return RecurrentStates(tensors["conv"].to(device), tensors["ssm"].to(device))
    return HistoryStates([tensors["tokens"].tolist()])


_NAMES = {"recurrent": {"conv", "ssm"}, "history": {"tokens"}}


def _read(blob: bytes) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """(metadata, tensors) of a blob; `safetensors.torch.load` gives no metadata, so its header is read here."""
    size = int.from_bytes(blob[:8], "little")
    try:
        about = json.loads(json.loads(blob[8 : 8 + size])["__metadata__"]["state"])
        version = about["format"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(_DAMAGED.format(f"no header: {error!r}")) from None
    if version != FORMAT:
        raise ValueError(f"the stored state has format {version!r}, this version reads {FORMAT!r}")
    try:
        tensors = load(blob)
    except SafetensorError as error:
        raise ValueError(_DAMAGED.format(error)) from None
    if set(tensors) != _NAMES.get(about["kind"]):
        raise ValueError(_DAMAGED.format(f"kind {about['kind']!r} with tensors {sorted(tensors)}"))
    return about, tensors
