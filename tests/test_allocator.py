"""Freed memory stays in the process: repeated big blocks cost no page faults."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

from lightning_modules.allocator import keep_freed_memory

FAULTS = """
import resource
import torch
from lightning_modules.allocator import keep_freed_memory

assert keep_freed_memory()
torch.set_num_threads(1)
for n in range(8):
    if n == 4:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    parts = [torch.ones(4_000_000) for _ in range(12)]  # 16 MB each
    del parts
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the settings are glibc's")
def test_blocks_are_used_again() -> None:
    done = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 1000  # four rounds of 192 MB are 190,000 pages of 4 KB


def test_elsewhere_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    assert not keep_freed_memory()
