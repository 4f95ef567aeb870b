"""A corpus as paragraphs: read from JSONL, kept on disk, fetched by id.

In:  `{"id","title","text"}` per line (formats.md), or `Paragraph`s. Out: distinct paragraphs in the order in which they
     came, each with a row number (its place in every index) and an id made of its content; paper C.1 removes duplicates
     "by document identifier", and a title alone is none.

The store is one SQLite file. Rows are fetched by id or number, so a corpus of any size costs no memory; ids and the
file's own ids are checked by its indexes, so finding duplicates costs none either.
"""

from __future__ import annotations

import hashlib
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from inference.jsonl import field, read_jsonl

EMPTY_DIGEST = hashlib.sha256(b"").hexdigest()

_TABLES = """
CREATE TABLE paragraphs (row INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, title TEXT NOT NULL, text TEXT NOT NULL,
                         source_id TEXT);
CREATE TABLE sources (source_id TEXT PRIMARY KEY, row INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE state (digest TEXT NOT NULL);
"""
_FIELDS = "title, text, source_id"


def paragraph_id(title: str, text: str) -> str:
    """`p_` + the first 12 hex digits of sha1(title + "\\x1f" + text): titles repeat with different texts."""
    digest = hashlib.sha1(f"{title}\x1f{text}".encode("utf-8", "surrogatepass")).hexdigest()
    return f"p_{digest[:12]}"


@dataclass(frozen=True)
class Paragraph:
    """One paragraph. `id` is made of title and text; `source_id` is the id it has in the file it came from."""

    title: str
    text: str
    source_id: str | None = None

    @cached_property
    def id(self) -> str:
        return paragraph_id(self.title, self.text)


@dataclass(frozen=True)
class Added:
    """What an addition did: paragraphs that are new, and those that were there already (same title and text)."""

    added: int
    duplicates: int


def read_corpus(path: str | Path) -> Iterator[tuple[str, Paragraph]]:
    """Yield ("FILE, line 3", paragraph) for every record of a corpus file; a title may be empty, a text may not.

    Raises FileNotFoundError, or ValueError naming file, line and field.
    """
    for where, record in read_jsonl(Path(path)):
        source_id = field(record, "id", (str, int), where)
        title, text = field(record, "title", str, where), field(record, "text", str, where)
        if not text.strip():
            raise ValueError(f"{where}: field 'text' is empty; remove the line")
        yield where, Paragraph(title, text, str(source_id))


def file_sha256(path: str | Path) -> str:
    """sha256 of a file's bytes. Raises FileNotFoundError with text."""
    if not Path(path).is_file():
        raise FileNotFoundError(f"{path}: no such file; give the path of a JSONL file")
    with Path(path).open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


class ParagraphStore:
    """The paragraphs of a corpus, rows 0, 1, … in one SQLite file. Safe to share between threads.

    limit: rows from here on do not exist for this reader (left over by an addition that did not come to its end).
    `stored` and `digest` are of all rows.
    Raises FileNotFoundError where there is no such file, ValueError where it is something else.
    """

    def __init__(self, path: str | Path, limit: int | None = None):
        self.path = Path(path)
        if not self.path.is_file():
            raise FileNotFoundError(f"{self.path}: missing, so this is not a (complete) index directory")
        self._lock = threading.RLock()
        self._db = sqlite3.connect(self.path, timeout=60, isolation_level=None, check_same_thread=False)
        try:
            self._db.execute("PRAGMA cache_size = -65536")  # 64 MB: the index of ids is in random order
            self.digest: str = self._db.execute("SELECT digest FROM state").fetchone()[0]
            self.stored: int = self._db.execute(
                "SELECT coalesce(max(row) + 1, 0) FROM paragraphs"
            ).fetchone()[0]
        except (sqlite3.DatabaseError, TypeError) as error:
            self._db.close()
            raise ValueError(
                f"{self.path}: holds no paragraphs of an index ({error}); build it again"
            ) from None
        self._rows = self.stored if limit is None else min(self.stored, limit)

    @staticmethod
    def create(path: str | Path) -> ParagraphStore:
        """An empty store. Raises FileExistsError if the file is there."""
        path = Path(path)
        if path.exists():
            raise FileExistsError(f"{path} is there already")
        db = sqlite3.connect(path)
        with _failures(path):
            db.executescript(_TABLES)
            db.execute("INSERT INTO state VALUES (?)", (EMPTY_DIGEST,))
            db.commit()
        db.close()
        return ParagraphStore(path)

    def __len__(self) -> int:
        return self._rows

    def extend(self, located: Iterable[tuple[str, Paragraph]]) -> Added:
        """Append those that are new, all or none. Each comes with its place, for the errors.

        Raises ValueError where one source id has two texts, where two paragraphs share an id by accident (12 hex
        digits: likely among tens of millions), or where a text has no UTF-8 form; OSError where the file cannot be
        written.
        """
        added = duplicates = 0
        with self._lock, self._transaction():
            digest, row = self.digest, self._rows
            for where, paragraph in located:
                known = self._known(where, paragraph)
                if known is None:
                    self._insert(where, paragraph, row)
                    digest = hashlib.sha256(f"{digest}{paragraph.id}".encode()).hexdigest()
                    row, added = row + 1, added + 1
                    known = row - 1
                else:
                    duplicates += 1
                if paragraph.source_id is not None:
                    self._db.execute(
                        "INSERT OR IGNORE INTO sources VALUES (?, ?)", (paragraph.source_id, known)
                    )
            self._db.execute("UPDATE state SET digest = ?", (digest,))
        self.digest, self._rows, self.stored = digest, row, row
        return Added(added, duplicates)

    def truncate(self, count: int, digest: str) -> None:
        """Forget the rows from `count` on; `digest` is the one that belongs to the first `count` rows."""
        with self._lock, self._transaction():
            self._db.execute("DELETE FROM paragraphs WHERE row >= ?", (count,))
            self._db.execute("DELETE FROM sources WHERE row >= ?", (count,))
            self._db.execute("UPDATE state SET digest = ?", (digest,))
        self.digest, self._rows, self.stored = digest, count, count

    def missing(self, paragraphs: Iterable[Paragraph]) -> list[Paragraph]:
        """Those that are not here yet, each once, in order."""
        seen: dict[str, Paragraph] = {}
        for paragraph in paragraphs:
            if self.find(paragraph.id) is None:
                seen.setdefault(paragraph.id, paragraph)
        return list(seen.values())

    def find(self, paragraph_id: str) -> int | None:
        """The row of an id, or None."""
        found = self._one("SELECT row FROM paragraphs WHERE id = ? AND row < ?", (paragraph_id, self._rows))
        return None if found is None else found[0]

    def rows(self, ids: Sequence[str]) -> list[int]:
        """The row of each id. Raises ValueError naming an id that is not here."""
        return [self._present(self.find(one), one) for one in ids]

    def ids(self, rows: Sequence[int]) -> list[str]:
        """The id of each row."""
        return [self._one("SELECT id FROM paragraphs WHERE row = ?", (row,))[0] for row in rows]

    def get(self, ids: Sequence[str]) -> list[Paragraph]:
        """The paragraph of each id, in that order. Raises ValueError naming an id that is not here."""
        query = f"SELECT {_FIELDS} FROM paragraphs WHERE id = ? AND row < ?"
        return [Paragraph(*self._present(self._one(query, (one, self._rows)), one)) for one in ids]

    def read(self, start: int, stop: int) -> list[Paragraph]:
        """Rows start … stop - 1."""
        with self._lock:
            found = self._db.execute(
                f"SELECT {_FIELDS} FROM paragraphs WHERE row >= ? AND row < ? ORDER BY row",
                (start, min(stop, self._rows)),
            ).fetchall()
        return [Paragraph(*fields) for fields in found]

    def close(self) -> None:
        self._db.close()

    # -- helpers ------------------------------------------------------------------------------------------------

    def _known(self, where: str, paragraph: Paragraph) -> int | None:
        """The row this very paragraph has already. ValueError where its ids mean another one."""
        found = self._one("SELECT row, title, text FROM paragraphs WHERE id = ?", (paragraph.id,))
        if found is not None and found[1:] != (paragraph.title, paragraph.text):
            raise ValueError(
                f"{where}: '{paragraph.title}' and '{found[1]}' have the same id {paragraph.id} by accident; "
                "change either"
            )
        if paragraph.source_id is not None:
            other = self._one("SELECT row FROM sources WHERE source_id = ?", (paragraph.source_id,))
            if other is not None and (found is None or other[0] != found[0]):
                raise ValueError(
                    f"{where}: id '{paragraph.source_id}' has another title or text than before; ids must be unique"
                )
        return None if found is None else found[0]

    def _insert(self, where: str, paragraph: Paragraph, row: int) -> None:
        values = (row, paragraph.id, paragraph.title, paragraph.text, paragraph.source_id)
        try:
            self._db.execute("INSERT INTO paragraphs VALUES (?, ?, ?, ?, ?)", values)
        except UnicodeEncodeError:
            raise ValueError(
                f"{where}: '{paragraph.title[:40]!a}' holds half a surrogate pair; write the whole character"
            ) from None

    def _one(self, query: str, values: tuple) -> Any:
        with self._lock:
            try:
                return self._db.execute(query, values).fetchone()
            except UnicodeEncodeError:  # half a character: nothing stored has such an id
                return None

    def _present(self, found: Any, one: str) -> Any:
        if found is None:
            raise ValueError(f"paragraph {one!a} is not in {self.path.parent}")
        return found

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        with _failures(self.path):
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:  # SQLite has rolled back already where the disk is full
                    self._db.execute("ROLLBACK")
                raise


@contextmanager
def _failures(path: Path) -> Iterator[None]:
    """What SQLite says when the disk is full or read-only, or another process was faster, with the file's name."""
    try:
        yield
    except sqlite3.IntegrityError as error:
        raise ValueError(
            f"{path}: another process has added to it ({error}); nothing was added, open the index again"
        ) from None
    except sqlite3.OperationalError as error:
        raise OSError(f"{path}: cannot be written ({error}); nothing was added") from None
