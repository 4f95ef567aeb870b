"""Faster memory on a CPU: glibc hands big blocks back to the system and asks for them anew in every operation.

A training step allocates the same blocks again and again, each fresh page is a page fault, and those cost a third of the
step (docs/performance.md). Two settings keep freed memory in the process instead; its peak stays what it was.
"""

from __future__ import annotations

import ctypes
import platform

# mallopt(3)
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4


def keep_freed_memory() -> bool:
    """Tell glibc to keep what is freed; returns whether it did (False where the C library is another one)."""
    if platform.system() != "Linux":
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    settings = ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, 2**31 - 1), (_TOP_PAD, 2**28))
    return all(mallopt(name, value) == 1 for name, value in settings)
