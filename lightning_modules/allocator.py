"""Faster memory on a CPU: glibc gives big blocks back to the system and asks for them anew in every operation.

A training step allocates the same blocks again and again; each fresh page is a page fault, and these cost a quarter
of the step (docs/performance.md). Blocks of up to 32 MB (the most that glibc takes) are kept in the process instead.
"""

from __future__ import annotations

import ctypes
import platform

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3  # mallopt(3)


def keep_freed_memory() -> bool:
    """Tell glibc to keep what is freed; returns whether it did (False where the C library is another one)."""
    if platform.system() != "Linux":
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    settings = ((_MMAP_THRESHOLD, 2**25), (_TRIM_THRESHOLD, 2**31 - 1), (_TOP_PAD, 2**28))
    return all(mallopt(name, value) == 1 for name, value in settings)
