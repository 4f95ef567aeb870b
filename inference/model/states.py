"""Recurrent states as a slot table: one slot a session, gathered into batches and scattered back.

In:  the convolution windows and scan states that ``TraceMambaForCausalLM.hidden`` returns.
Out: batches of them in any order, copies for branching (``fork``), files (safetensors).
Paper: CMT-RAG 3.1 and C.3 (the state h_t is the runtime memory; packed recurrent caches for 16 sessions).

Legend: E layers, S slots (= batch rows), C conv channels, K conv width, H heads, P head dim, N state.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

_FORMAT = "trace-memory-states/1"


@dataclass
class RecurrentStates:
    """States of all layers for S slots, always fp32.

    Attributes:
        conv_ESCK: last K-1 inputs of each convolution, (E, S, C, K-1).
        ssm_ESHPN: scan states, (E, S, H, P, N).
    """

    conv_ESCK: Tensor
    ssm_ESHPN: Tensor

    @classmethod
    def zeros(cls, config, slots: int, device: torch.device | str = "cpu") -> "RecurrentStates":
        """Fresh states: what a model has seen before its first token."""
        inner = config.hidden_size * config.expand
        channels = inner + 2 * config.n_groups * config.state_size
        layers = config.num_hidden_layers
        conv = torch.zeros(layers, slots, channels, config.conv_kernel - 1, device=device)
        ssm = torch.zeros(layers, slots, config.num_heads, config.head_dim, config.state_size, device=device)
        return cls(conv, ssm)

    def __len__(self) -> int:
        return self.conv_ESCK.shape[1]

    def _index(self, rows: Sequence[int] | Tensor) -> Tensor:
        index = torch.as_tensor(rows, dtype=torch.long, device=self.conv_ESCK.device)
        if index.numel() and (int(index.min()) < 0 or int(index.max()) >= len(self)):
            raise IndexError(f"slots {index.tolist()} are not all within 0..{len(self) - 1}")
        return index

    def gather(self, rows: Sequence[int] | Tensor) -> "RecurrentStates":
        """Copies of the given slots as a batch, in that order; a slot may be named more than once."""
        index = self._index(rows)
        return RecurrentStates(self.conv_ESCK.index_select(1, index), self.ssm_ESHPN.index_select(1, index))

    select = gather

    def scatter_(self, rows: Sequence[int] | Tensor, states: "RecurrentStates") -> "RecurrentStates":
        """Writes a batch back into the given slots, in place. ValueError when the numbers differ or a slot repeats."""
        index = self._index(rows)
        if len(index) != len(states) or len(index.unique()) != len(index):
            raise ValueError(
                f"{len(states)} states cannot be written to slots {index.tolist()}: one distinct slot each"
            )
        self.conv_ESCK.index_copy_(1, index, states.conv_ESCK.detach())
        self.ssm_ESHPN.index_copy_(1, index, states.ssm_ESHPN.detach())
        return self

    def fork(self, source: int, targets: Sequence[int]) -> "RecurrentStates":
        """Copies slot ``source`` into every slot of ``targets``, in place: branches of one dialogue."""
        return self.scatter_(targets, self.gather([source] * len(targets)))

    def reset_(self, rows: Sequence[int] | Tensor) -> "RecurrentStates":
        """Empties the given slots, in place."""
        index = self._index(rows)
        self.conv_ESCK.index_fill_(1, index, 0.0)
        self.ssm_ESHPN.index_fill_(1, index, 0.0)
        return self

    @staticmethod
    def cat(parts: Sequence["RecurrentStates"]) -> "RecurrentStates":
        """Joins batches along the slot axis."""
        return RecurrentStates(
            torch.cat([p.conv_ESCK for p in parts], 1), torch.cat([p.ssm_ESHPN for p in parts], 1)
        )

    def save(self, path: str | Path, **metadata: str) -> None:
        """Writes a safetensors file (fp32) atomically, with the given strings as metadata."""
        path = Path(path)
        partial = path.with_name(path.name + ".partial")
        tensors = {
            "conv": self.conv_ESCK.detach().cpu().contiguous(),
            "ssm": self.ssm_ESHPN.detach().cpu().contiguous(),
        }
        save_file(
            tensors, partial, metadata={"format": _FORMAT, "extra": json.dumps(metadata, sort_keys=True)}
        )
        partial.replace(path)

    @classmethod
    def load(
        cls, path: str | Path, device: torch.device | str = "cpu"
    ) -> tuple["RecurrentStates", dict[str, str]]:
        """Reads what ``save`` wrote and returns it with its metadata.

        Raises:
            FileNotFoundError: no such file.  ValueError: not a states file, or a damaged one.
        """
        path = Path(path)
        if not path.is_file():
            raise FileNotFoundError(f"{path}: no recurrent states here")
        try:
            with safe_open(path, framework="pt", device=str(device)) as file:
                meta = file.metadata() or {}
                if meta.get("format") != _FORMAT:
                    raise ValueError(
                        f"{path}: not a recurrent-states file (format {meta.get('format')!r}, want {_FORMAT!r})"
                    )
                return cls(file.get_tensor("conv"), file.get_tensor("ssm")), json.loads(meta["extra"])
        except SafetensorError as error:
            raise ValueError(
                f"{path}: damaged recurrent-states file ({error}); delete it and replay the session"
            ) from error
