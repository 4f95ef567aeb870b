"""What every test shares: one thread, no network, a home of its own, and the skips of the `gpu` and `shared` markers.

The environment is set before torch and transformers are imported, so it also reaches child processes.
"""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

# One thread: sums are taken in the same order on every machine, and two test processes do not fight for cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.update(
    HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", TOKENIZERS_PARALLELISM="false", MPLBACKEND="Agg"
)

import pytest
import torch

REPOSITORY = Path(__file__).resolve().parents[1]
SHARED = REPOSITORY.parent / "shared"

torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


@pytest.fixture(scope="session", autouse=True)
def _own_home() -> Iterator[None]:
    """Worlds, indexes and sessions of the tests go to a temporary TRACE_MEMORY_HOME, never to the user's cache."""
    before = os.environ.get("TRACE_MEMORY_HOME")
    with tempfile.TemporaryDirectory(prefix="trace-memory-") as folder:
        os.environ["TRACE_MEMORY_HOME"] = folder
        yield
    if before is None:
        del os.environ["TRACE_MEMORY_HOME"]
    else:
        os.environ["TRACE_MEMORY_HOME"] = before


@pytest.fixture(scope="session")
def repository() -> Path:
    """The folder that holds pyproject.toml."""
    return REPOSITORY


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The benchmark files (MuSiQue, LoCoMo, ...); skips where the checkout has none beside it."""
    if not (SHARED / "data").is_dir():
        pytest.skip("no benchmark files in ../shared/data")
    return SHARED / "data"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    unmet = {}
    if not torch.cuda.is_available():
        unmet["gpu"] = "no CUDA device"
    if not SHARED.is_dir():
        unmet["shared"] = "no benchmark files in ../shared"
    for item in items:
        for marker, reason in unmet.items():
            if item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))
