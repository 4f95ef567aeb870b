"""Where this project keeps what it builds for itself: worlds, indexes, converted models, sessions, caches.

In:  TRACE_MEMORY_HOME. Out: a directory path (not created). design.md section 3 ("Finding things").
"""

from __future__ import annotations

import os
from pathlib import Path


def memory_home() -> Path:
    """TRACE_MEMORY_HOME, else `trace-memory` in the user's cache directory."""
    if home := os.environ.get("TRACE_MEMORY_HOME"):
        return Path(home).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "trace-memory"
