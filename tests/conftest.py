"""What every test shares: one thread, no network, a home of its own, and the skips of the `gpu` and `shared` markers.

The environment is set before torch and transformers are imported, so it also reaches child processes.
"""

import os
import subprocess
import sys
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


@pytest.fixture
def in_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working directory of the test's own, and a command line that is not pytest's."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["cli"])


@pytest.fixture(scope="session")
def small_world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A world directory of 400 training and 120 development questions, seed 42. Tests only read it."""
    from datamodules.world import build_world

    out = tmp_path_factory.mktemp("world") / "w"
    build_world(out, 42, 400, 120, paragraphs=False)
    return out


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run, by the real command in a process of its own; the output lies beside it. Tests only read it."""
    from tests.cli_tools import FAST
    from tests.tiny_training import fit_arguments

    folder = tmp_path_factory.mktemp("done")
    options = {
        **FAST,
        "model.plan_metrics_dialogues": 2,
        "model.max_new_tokens": 40,
        "trainer.callbacks": None,
    }
    arguments = fit_arguments(**options)
    result = subprocess.run(
        [sys.executable, "-m", "lightning_modules.cli", *arguments],
        cwd=folder, env={**os.environ, "PYTHONPATH": str(REPOSITORY)}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    (folder / "stdout").write_text(result.stdout)
    (folder / "stderr").write_text(result.stderr)
    assert result.returncode == 0, result.stdout + result.stderr
    return folder


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
