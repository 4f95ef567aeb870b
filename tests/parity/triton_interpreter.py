"""mamba-ssm's Triton kernels without a GPU: Triton interprets them on the CPU, slowly and exactly.

In: an environment with triton and mamba-ssm (tests/parity/install.py) and TRITON_INTERPRET=1. Out: after
`enable()`, `mamba_ssm.ops.triton.*` imports and runs on CPU tensors, so the code under test calls the kernels as
it does on a GPU. `enable()` changes process-wide state and is not undone: parity tests run in a process of their
own (`make parity`).
"""

import contextlib
import importlib
import importlib.util
import os
import sys
import types

import torch

KERNEL_MODULES = (
    "mamba_ssm.ops.triton.ssd_bmm",
    "mamba_ssm.ops.triton.ssd_chunk_scan",
    "mamba_ssm.ops.triton.ssd_chunk_state",
    "mamba_ssm.ops.triton.ssd_combined",
    "mamba_ssm.ops.triton.ssd_state_passing",
    "mamba_ssm.ops.triton.selective_state_update",
)


def missing() -> str | None:
    """Why the kernels cannot be interpreted here, in a sentence for a skip message; None where they can."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return "TRITON_INTERPRET is not 1; run `make parity`"
    for name in ("triton", "einops", "mamba_ssm"):
        if importlib.util.find_spec(name) is None:
            return f"{name} is not installed; run `make parity`"
    return None


def enable() -> None:
    """Import the kernel modules and fit them for interpretation.

    What stands in the way: `import mamba_ssm` wants its compiled extension; the wrappers enter
    `torch.cuda.device`; the backward pass asks how many multiprocessors the device has, to split its work; and
    the autotuner times every configuration on a device.

    Raises:
        RuntimeError: with the text of `missing()`.
    """
    reason = missing()
    if reason:
        raise RuntimeError(reason)
    _register_package_without_extension("mamba_ssm")
    torch.cuda.device = contextlib.nullcontext  # type: ignore[assignment, misc]
    torch.cuda.get_device_properties = lambda device: types.SimpleNamespace(multi_processor_count=1)  # type: ignore
    from triton.runtime.autotuner import Autotuner

    for name in KERNEL_MODULES:
        for value in vars(importlib.import_module(name)).values():
            if isinstance(value, Autotuner):
                value.configs = value.configs[:1]


def _register_package_without_extension(name: str) -> None:
    """Put a bare module with the installed package's path into sys.modules; its __init__ never runs."""
    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.submodule_search_locations is not None
    package = types.ModuleType(name)
    package.__path__ = list(spec.submodule_search_locations)
    package.__spec__ = spec
    sys.modules[name] = package
