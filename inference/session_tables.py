"""The session store's database: its tables, how it is opened, and its errors in the user's words.

In:  a file path (SQLite) or a SQLAlchemy URL (SQLite or PostgreSQL). Out: an engine whose tables are there.
design.md section 5, "State store".

SQLite runs in WAL mode with synchronous=FULL: a commit has reached the disk when it returns, so a turn reported as
done survives a killed process and a power cut alike; a turn takes seconds, the fsync milliseconds.
A transaction that writes begins with BEGIN IMMEDIATE: it waits for others at its start, never in its middle.
"""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path

from sqlalchemy import (
    URL,
    Column,
    Connection,
    Double,
    Engine,
    ForeignKey,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    create_engine,
    event,
    inspect,
    make_url,
    select,
)
from sqlalchemy.exc import ArgumentError, DBAPIError

from inference.home import memory_home

SCHEMA_VERSION = 1
"""Of the tables below. A store of another version is refused, never altered."""

NAME_LENGTH = 200

_metadata = MetaData()

schema_table = Table(
    "trace_memory_schema",
    _metadata,
    Column("version", Integer, primary_key=True, autoincrement=False),
)
sessions_table = Table(
    "trace_memory_sessions",
    _metadata,
    Column("id", Integer, primary_key=True),
    Column("name", String(NAME_LENGTH), nullable=False, unique=True),
    Column("created", String(40), nullable=False),  # ISO 8601, UTC
    Column("updated", String(40), nullable=False),
    Column("generator", Text, nullable=False),  # hash of the generator that the states belong to
    Column("settings", Text, nullable=False),  # JSON
    Column("turns", Integer, nullable=False),  # number of the last turn
    Column("parent", Text),  # name of the session it was forked from, and after which turn
    Column("parent_turn", Integer),
    Column("lease_id", String(32)),
    Column("lease_holder", Text),  # JSON
    Column("lease_since", String(40)),
    Column("lease_expires", Double),  # seconds since the epoch
)
turns_table = Table(
    "trace_memory_turns",
    _metadata,
    Column("session_id", ForeignKey(sessions_table.c.id), primary_key=True),
    Column("number", Integer, primary_key=True, autoincrement=False),
    Column("created", String(40), nullable=False),
    Column("record", Text, nullable=False),  # JSON in ASCII: any Python string survives, in any database
    Column("sha256", String(64), nullable=False),  # of the record
)
states_table = Table(
    "trace_memory_states",
    _metadata,
    Column("session_id", ForeignKey(sessions_table.c.id), primary_key=True),
    Column("number", Integer, primary_key=True, autoincrement=False),  # the state after this turn
    Column("size", Integer, nullable=False),  # bytes
    Column("sha256", String(64), nullable=False),  # of the blob
    Column("blob", LargeBinary, nullable=False),
)


class StoreError(OSError):
    """The store cannot be used right now (full disk, no permission, damage, a lock); what is stored is still stored."""


def store_url(url_or_path: str | Path | None) -> URL:
    """Where sessions live: a URL as it is, a path as an SQLite file, None as `sessions.db` under `memory_home()`.

    Raises ValueError for a database other than an SQLite file or PostgreSQL.
    """
    if url_or_path is None:
        url_or_path = memory_home() / "sessions.db"
    if isinstance(url_or_path, str) and "://" in url_or_path:
        try:
            url = make_url(url_or_path)
        except (ArgumentError, ValueError):
            # The text may hold a password, so it is not repeated.
            raise ValueError(
                "the store's URL cannot be read; it looks like sqlite:////path/sessions.db or "
                "postgresql+psycopg://user@host/database"
            ) from None
        if url.get_backend_name() not in ("sqlite", "postgresql"):
            raise ValueError(f"a session store is an SQLite file or PostgreSQL, not {url.get_backend_name()}")
    else:
        url = URL.create("sqlite", database=str(Path(url_or_path).expanduser()))
    if url.get_backend_name() == "sqlite":
        database = url.database or ":memory:"
        if database == ":memory:" or database.startswith("file:"):
            raise ValueError("a session store outlives its process, so it needs a file: name one with store=")
    return url


def open_engine(url: URL, busy_seconds: float) -> Engine:
    """An engine on the store, with its tables made if there are none.

    `busy_seconds`: how long to wait for another process that is writing.
    Raises ValueError for a store of another schema version or a missing driver, StoreError where it cannot be opened.
    """
    try:
        if url.get_backend_name() == "sqlite":
            engine = _sqlite_engine(url, busy_seconds)
        else:
            engine = create_engine(url, hide_parameters=True, pool_pre_ping=True)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"{shown(url)}: the package {error.name} is missing; install it with: pip install 'trace-memory[postgres]'"
        ) from None
    try:
        with engine.execution_options(write=True).begin() as db:
            _make_tables(db, url)
    except DBAPIError as error:
        engine.dispose()
        raise explain(error, url) from error
    except BaseException:
        engine.dispose()
        raise
    return engine


def shown(url: URL) -> str:
    """The file, or the URL without its password."""
    return (
        str(url.database) if url.get_backend_name() == "sqlite" else url.render_as_string(hide_password=True)
    )


def explain(error: DBAPIError, url: URL) -> StoreError:
    """The database's error as one that says what to do."""
    where, said = shown(url), str(error.orig).strip()
    # The low byte is the error itself, the rest its variant.
    code = (getattr(error.orig, "sqlite_errorcode", None) or 0) & 0xFF
    advice = {
        sqlite3.SQLITE_FULL: "the disk (or a quota) is full; free some space and try again",
        sqlite3.SQLITE_IOERR: "the file could not be read or written; check the disk and its quotas, and try again",
        sqlite3.SQLITE_READONLY: "the file or its directory may not be written; change the permissions, or name "
        "another place with store=",
        sqlite3.SQLITE_CANTOPEN: "the file cannot be opened or made here; check that its directory may be written, or "
        "name another place with store=",
        sqlite3.SQLITE_BUSY: "another program holds the file locked; close it there and try again",
        sqlite3.SQLITE_LOCKED: "another program holds the file locked; close it there and try again",
        sqlite3.SQLITE_NOTADB: "this is no session store, or a damaged one; name another file with store=",
        sqlite3.SQLITE_CORRUPT: "the file is damaged; keep a copy, rescue what can be read with "
        "`sqlite3 FILE .recover | sqlite3 NEW`, and name the new file with store=",
    }.get(code, "check that the database runs and may be written, and try again")
    return StoreError(f"{where}: {advice} ({said})")


# -- helpers ----------------------------------------------------------------------------------------------------


def _sqlite_engine(url: URL, busy_seconds: float) -> Engine:
    path = Path(str(url.database))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Dialogues are private: only their owner reads them. SQLite gives its -wal and -shm files the same mode.
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
    except OSError as error:
        raise StoreError(
            f"{path}: a session store cannot be opened or made here ({error.strerror}); check that the directory may "
            "be written, or name another place with store="
        ) from None
    # isolation_level None: the driver begins no transactions of its own, `begin` below does.
    engine = create_engine(
        url, hide_parameters=True, connect_args={"timeout": busy_seconds, "isolation_level": None}
    )

    @event.listens_for(engine, "connect")
    def configure(connection: sqlite3.Connection, _record: object) -> None:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA foreign_keys = ON")
        # A large state leaves a large log behind; it is cut back to this after a checkpoint.
        connection.execute(f"PRAGMA journal_size_limit = {64 * 2**20}")

    @event.listens_for(engine, "begin")
    def begin(db: Connection) -> None:
        db.exec_driver_sql("BEGIN IMMEDIATE" if db.get_execution_options().get("write") else "BEGIN")

    return engine


def _make_tables(db: Connection, url: URL) -> None:
    found = set(inspect(db).get_table_names())
    ours = set(_metadata.tables)
    if schema_table.name in found:
        versions = list(db.scalars(select(schema_table.c.version)))
        if versions != [SCHEMA_VERSION]:
            raise ValueError(
                f"{shown(url)}: a session store of schema version {', '.join(map(str, versions)) or 'none'}; this "
                f"trace-memory reads version {SCHEMA_VERSION}. Use the one that made it, or name another with store="
            )
        if missing := ours - found:
            raise StoreError(
                f"{shown(url)}: the store lacks the tables {', '.join(sorted(missing))}; it is damaged"
            )
        return
    if url.get_backend_name() == "sqlite" and found:
        raise ValueError(
            f"{shown(url)}: a database of something else (it has the table {min(found)}); name another file with store="
        )
    _metadata.create_all(db)
    db.execute(schema_table.insert().values(version=SCHEMA_VERSION))
