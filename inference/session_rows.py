"""Reading and writing the rows of one session inside a transaction that `inference.sessions` has begun.

In:  a connection, and a session's row. Out: turns, states, what is known of it; every checksum verified.
"""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import Connection, Row, Table, delete, func, insert, literal, select

from inference.session_lease import Holder, LeaseRow
from inference.session_records import SessionInfo, StoredState, Turn, sha256
from inference.session_states import surplus_states
from inference.session_tables import StoreError, sessions_table, states_table, turns_table


def lock_session(db: Connection, which: Any, read: bool = False) -> Row[Any] | None:
    """The session's row, locked until the transaction ends: against writers, or against everybody (read False).

    SQLite has no such locks and needs none: a transaction that writes is alone, one that reads sees a snapshot.
    """
    return db.execute(select(sessions_table).where(which).with_for_update(read=read)).one_or_none()


def read_info(db: Connection, row: Row[Any]) -> SessionInfo:
    size = db.scalar(select(func.sum(states_table.c.size)).where(states_table.c.session_id == row.id))
    lease = read_lease(row)
    in_use = lease is not None and lease.blocker(clock(db)) is not None
    return SessionInfo(
        name=row.name, created=row.created, updated=row.updated, turns=row.turns, generator_hash=row.generator,
        settings=json.loads(row.settings), parent=row.parent, parent_turn=row.parent_turn,
        state_bytes=int(size or 0), used_by=str(lease) if in_use else None,
    )  # fmt: skip


def read_lease(row: Row[Any]) -> LeaseRow | None:
    if row.lease_id is None:
        return None
    return LeaseRow(row.lease_id, Holder.from_json(row.lease_holder), row.lease_since, row.lease_expires)


def read_turns(db: Connection, row: Row[Any], first: int, where: str) -> list[Turn]:
    """Turns `first` to the last. Raises StoreError, naming `where`, if one is missing or not as it was written."""
    stored = db.execute(
        select(turns_table.c.number, turns_table.c.record, turns_table.c.sha256)
        .where(turns_table.c.session_id == row.id, turns_table.c.number >= first)
        .order_by(turns_table.c.number)
    ).all()
    if [turn.number for turn in stored] != list(range(first, row.turns + 1)):
        raise _damaged(where, f"turns {first} to {row.turns} are not all there")
    for turn in stored:
        if sha256(turn.record.encode()) != turn.sha256:
            raise _damaged(where, f"turn {turn.number} is not what was written")
    return [Turn.from_record(turn.number, turn.record) for turn in stored]


def read_state(db: Connection, row: Row[Any], turn: int, where: str) -> StoredState:
    """The newest kept state that is not after `turn`. Raises StoreError if it is not as it was written."""
    found = db.execute(
        select(states_table.c.number, states_table.c.blob, states_table.c.sha256)
        .where(states_table.c.session_id == row.id, states_table.c.number <= turn)
        .order_by(states_table.c.number.desc())
        .limit(1)
    ).one_or_none()
    if found is None:
        return StoredState(0)
    blob = bytes(found.blob)
    if sha256(blob) != found.sha256:
        raise _damaged(where, f"the state after turn {found.number} is not what was written")
    return StoredState(found.number, blob, found.sha256)


def is_stored(db: Connection, row: Row[Any], number: int, record: str, blob: bytes) -> bool:
    """Whether exactly this turn and this state are there."""
    stored = [
        db.scalar(select(table.c.sha256).where(table.c.session_id == row.id, table.c.number == number))
        for table in (turns_table, states_table)
    ]
    return stored == [sha256(record.encode()), sha256(blob)]


def write_turn(db: Connection, row: Row[Any], number: int, record: str) -> None:
    values = {"session_id": row.id, "number": number, "created": timestamp(), "record": record}
    db.execute(insert(turns_table).values(**values, sha256=sha256(record.encode())))


def write_state(db: Connection, row: Row[Any], turn: int, blob: bytes, budget: int) -> None:
    """Keep a state (in place of one of the same turn), and drop what no longer fits into the budget."""
    remove_turn(db, states_table, row, turn)
    values = {"session_id": row.id, "number": turn, "size": len(blob), "sha256": sha256(blob), "blob": blob}
    db.execute(insert(states_table).values(values))
    of_session = states_table.c.session_id == row.id
    kept = db.execute(select(states_table.c.number, states_table.c.size).where(of_session)).all()
    if dropped := surplus_states(dict(kept), budget):
        db.execute(delete(states_table).where(of_session, states_table.c.number.in_(dropped)))


def remove_turn(db: Connection, table: Table, row: Row[Any], number: int) -> None:
    db.execute(delete(table).where(table.c.session_id == row.id, table.c.number == number))


def remove_session(db: Connection, row: Row[Any]) -> None:
    for table in (states_table, turns_table):
        db.execute(delete(table).where(table.c.session_id == row.id))
    db.execute(delete(sessions_table).where(sessions_table.c.id == row.id))


def insert_session(db: Connection, **values: Any) -> int:
    """A new row, by its id. Raises IntegrityError where the name is taken."""
    now = timestamp()
    key = db.execute(insert(sessions_table).values(created=now, updated=now, **values)).inserted_primary_key
    assert key is not None  # an insert of one row has one
    return key[0]


def copy_rows(db: Connection, row: Row[Any], new_id: int, last: int) -> None:
    """Copy a session's turns and states up to turn `last`, within the database."""
    for table in (turns_table, states_table):
        others = [column for column in table.c if column.name != "session_id"]
        copied = select(literal(new_id), *others).where(table.c.session_id == row.id, table.c.number <= last)
        names = ["session_id", *(column.name for column in others)]
        db.execute(insert(table).from_select(names, copied))


def timestamp() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def clock(db: Connection) -> float:
    """Seconds since the epoch, by one clock for all who share the store: the server's, or the machine's for a file."""
    if db.dialect.name == "sqlite":
        return time.time()
    return db.execute(select(func.current_timestamp())).scalar_one().timestamp()


def _damaged(where: str, what: str) -> StoreError:
    return StoreError(
        f"{where} is damaged: {what}. Restore the store from a copy, or fork the session after an earlier turn"
    )
