"""Weight files, read so that a damaged or foreign one is named: what adapters and model directories share.

In:  safetensors files.  Out: tensors by name, checked against the names and shapes that a model expects.
"""

from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor


def read_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a safetensors file. ValueError names a damaged or half-written one."""
    try:
        return load_file(path)
    except SafetensorError as error:
        raise ValueError(
            f"{path}: damaged or half-written ({error}); copy it again or save it again"
        ) from error


def check_tensors(given: Mapping[str, Tensor], expected: Mapping[str, Tensor], path: Path) -> None:
    """ValueError that names the first tensor of ``path`` which is missing, unknown or of another shape."""
    for key in sorted(expected.keys() ^ given.keys()):
        where = "lack" if key in expected else "have an unknown tensor"
        raise ValueError(f"{path}: the weights {where} {key!r}; the file is half-written or of another model")
    for key, value in given.items():
        if value.shape != expected[key].shape:
            raise ValueError(
                f"{path}: {key!r} is {tuple(value.shape)}, this model needs {tuple(expected[key].shape)}"
            )
