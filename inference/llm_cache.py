"""Responses of a language model on disk, so that no request is ever paid for twice.

In:  the sha256 of a canonical request. Out: the stored response (a JSON object), or None.

One SQLite file in WAL mode. Each response is a transaction of its own: a process killed in the middle of a write loses
that response and nothing else, and several threads and processes may share the file.
"""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import Any


class ResponseCache:
    """A file of responses. Raises ValueError when `path` cannot be opened, or is not such a file."""

    def __init__(self, path: str | Path):
        self.path = Path(path).expanduser()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # Opened by the caller, used by the client's own thread only.
            self._db = sqlite3.connect(self.path, timeout=60, isolation_level=None, check_same_thread=False)
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = NORMAL")
            self._db.execute(
                "CREATE TABLE IF NOT EXISTS responses (key TEXT PRIMARY KEY, response TEXT NOT NULL)"
            )
        except (OSError, sqlite3.Error) as error:
            raise ValueError(
                f"{self.path}: cannot be used as a response cache ({error}); name another file"
            ) from None

    def get(self, key: str) -> dict[str, Any] | None:
        row = self._db.execute("SELECT response FROM responses WHERE key = ?", (key,)).fetchone()
        return None if row is None else json.loads(row[0])

    def add(self, key: str, response: dict[str, Any]) -> dict[str, Any]:
        """Store a response and return the one that counts: an earlier one, if another process was first.

        Raises OSError when the file cannot be written.
        """
        text = json.dumps(response, sort_keys=True)  # ASCII, so that a lone surrogate can be stored too
        try:
            self._db.execute("INSERT OR IGNORE INTO responses VALUES (?, ?)", (key, text))
        except sqlite3.Error as error:
            raise OSError(f"{self.path}: a response could not be stored ({error})") from None
        return self.get(key) or response

    def close(self) -> None:
        self._db.close()
