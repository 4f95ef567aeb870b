"""Sessions that survive a restart: each turn is one transaction (design.md section 5; CMT-RAG 3.4, Algorithm 1).

In:  turns as JSON-serialisable records, the generator's state after each as bytes (`inference.state_blob`).
Out: the same, in order and whole, from one SQLite file (`memory_home()`/sessions.db) or PostgreSQL.

1. `open` makes or finds a session and leases it to the caller: nobody else can write to it.
2. `append_turn` stores a turn and its state, if the lease still holds and the turn is the next one; else nothing.
3. `load` gives all turns and the newest kept state; `fork`, `undo`, `export`, `delete`, `list` do what they say.

States of earlier turns are kept within a budget (`inference.session_states`). Where a state was dropped,
`StoredState.turn` says after which turn the nearest earlier one is, and the turns behind it are to be replayed.
A store may be shared by threads. A forked process opens its own.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, select, update
from sqlalchemy.exc import DBAPIError, IntegrityError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from inference import session_rows as rows
from inference.session_lease import LIVE, Holder, Lease
from inference.session_records import (
    SessionBusy,
    SessionChanged,
    SessionInfo,
    StoredSession,
    StoredState,
    Turn,
    check_name,
    to_json,
)
from inference.session_states import STATE_BUDGET
from inference.session_tables import (
    StoreError,
    explain,
    open_engine,
    sessions_table,
    shown,
    states_table,
    store_url,
    turns_table,
)

__all__ = [
    "Lease", "SessionBusy", "SessionChanged", "SessionInfo", "SessionStore", "StoreError", "StoredSession",
    "StoredState", "Turn",
]  # fmt: skip

_log = logging.getLogger(__name__)
_FREE: dict[str, None] = dict.fromkeys(("lease_id", "lease_holder", "lease_since", "lease_expires"))


class SessionStore:
    """A store of sessions; see the module.

    Args:
        url_or_path: a file, a SQLAlchemy URL, or None for the default place.
        lease_seconds: after how long a holder on another machine that gives no sign of life loses its sessions.
        busy_seconds: how long to wait for another process that is writing.
        state_budget: bytes of states kept per session.

    Raises ValueError for a place that can be no store or one of another version, StoreError where it cannot be opened.
    Every method raises StoreError, with nothing changed, when the database fails, and may be called again.
    """

    def __init__(
        self,
        url_or_path: str | Path | None = None,
        *,
        lease_seconds: float = 60.0,
        busy_seconds: float = 10.0,
        state_budget: int = STATE_BUDGET,
    ) -> None:
        self.url = store_url(url_or_path)
        self.lease_seconds, self.state_budget = lease_seconds, state_budget
        self._engine = open_engine(self.url, busy_seconds)
        self._writer = self._engine.execution_options(write=True)
        # SQLite lets one writer in and has the others poll; threads of one process queue here instead.
        one_writer = self.url.get_backend_name() == "sqlite"
        self._turn_to_write: Any = threading.Lock() if one_writer else contextlib.nullcontext()
        self._leases: weakref.WeakSet[Lease] = weakref.WeakSet()  # those that somebody holds
        self._issued: set[str] = set()  # the ids of those given out and not given back
        self._closed = threading.Event()
        self._heart: threading.Thread | None = None

    def __repr__(self) -> str:
        return f"SessionStore({shown(self.url)!r})"

    def __enter__(self) -> SessionStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give back all leases and close the database. What is stored stays."""
        if self._closed.is_set():
            return
        try:
            for lease in list(self._leases):
                self.close_session(lease)
        finally:
            self._closed.set()
            self._engine.dispose()

    # -- one session --------------------------------------------------------------------------------------------

    def open(
        self, name: str, generator_hash: str | None = None, settings: dict[str, Any] | None = None
    ) -> Lease:
        """Lease a session to the caller; with a generator's hash, make it where there is none.

        A session without turns takes on generator and settings; one with turns keeps its own.

        Raises:
            SessionBusy: somebody else has it open.
            ValueError: a name that cannot be one, no such session, or its states belong to another generator.
        """
        check_name(name)
        try:
            lease = self._open(name, generator_hash, settings)
        except IntegrityError:  # another process made it between our look and our insert
            lease = self._open(name, generator_hash, settings)
        self._leases.add(lease)
        self._issued.add(lease.id)
        if self._heart is None:
            beat = (weakref.ref(self), self._closed, self.lease_seconds / 3)
            self._heart = threading.Thread(target=_beat, args=beat, name="session-leases", daemon=True)
            self._heart.start()
        return lease

    def close_session(self, lease: Lease) -> None:
        """Give a lease back. One that was lost meanwhile is nobody's to give, and that is no error."""
        with self._transaction(write=True) as db:
            db.execute(update(sessions_table).where(_leased({lease.id})).values(_FREE))
        self._leases.discard(lease)
        self._issued.discard(lease.id)
        LIVE.pop(lease.id, None)

    def append_turn(self, lease: Lease, turn: Turn, state: bytes) -> None:
        """Store the next turn and the state after it. When this returns, both are on disk; when it raises, neither.

        The one exception: a server's connection that breaks during the commit leaves open which. So the same call may
        be made again after any StoreError; a turn that is there already is not stored twice.

        Raises:
            SessionChanged: the lease was lost, or `turn.number` does not follow the last stored turn.
            ValueError: a record that is not JSON.
        """
        record = turn.to_record()
        with self._transaction(write=True) as db:
            row = self._held(db, lease)
            if turn.number == row.turns and rows.is_stored(db, row, turn.number, record, state):
                return
            if turn.number != row.turns + 1:
                raise SessionChanged(
                    f"turn {turn.number} does not follow: {self._named(row.name)} ends with turn {row.turns}. "
                    "Nothing was stored; load the session to go on from there"
                )
            rows.write_turn(db, row, turn.number, record)
            rows.write_state(db, row, turn.number, state, self.state_budget)
            expires = rows.clock(db) + self.lease_seconds
            self._set(db, row.id, turns=turn.number, updated=rows.timestamp(), lease_expires=expires)

    def put_state(self, lease: Lease, turn: int, state: bytes) -> None:
        """Keep the state after an earlier turn, as a replay rebuilt it. Raises like `append_turn`."""
        with self._transaction(write=True) as db:
            row = self._held(db, lease)
            self._check_turn(row, turn, first=1)
            rows.write_state(db, row, turn, state, self.state_budget)

    def undo(self, lease: Lease) -> Turn:
        """Drop the last turn and return it. Raises SessionChanged like `append_turn`, ValueError if there is none."""
        with self._transaction(write=True) as db:
            row = self._held(db, lease)
            if row.turns == 0:
                raise ValueError(f"{self._named(row.name)} has no turn to undo")
            [turn] = rows.read_turns(db, row, row.turns, self._named(row.name))
            for table in (states_table, turns_table):
                rows.remove_turn(db, table, row, row.turns)
            self._set(db, row.id, turns=row.turns - 1, updated=rows.timestamp())
        return turn

    def load(self, name: str) -> StoredSession:
        """All of a session. Raises ValueError for an unknown name, StoreError where what is stored is damaged."""
        with self._transaction() as db:
            row = self._row(db, name, read=True)
            turns = rows.read_turns(db, row, 1, self._named(name))
            state = rows.read_state(db, row, row.turns, self._named(name))
            return StoredSession(rows.read_info(db, row), tuple(turns), state)

    def state(self, name: str, turn: int) -> StoredState:
        """The newest kept state that is not after `turn`: where a replay up to `turn` has to start.

        Raises ValueError for an unknown name or a turn that the session does not have (0 is before the first).
        """
        with self._transaction() as db:
            row = self._row(db, name, read=True)
            self._check_turn(row, turn)
            return rows.read_state(db, row, turn, self._named(name))

    def fork(self, name: str, new_name: str, turn: int | None = None) -> SessionInfo:
        """Copy a session as it was after `turn` (None: the last), kept states included. The source may be in use.

        Raises ValueError for an unknown name or turn, and where `new_name` is taken.
        """
        check_name(new_name)
        try:
            with self._transaction(write=True) as db:
                row = self._row(db, name)
                last = row.turns if turn is None else turn
                self._check_turn(row, last)
                new_id = rows.insert_session(
                    db, name=new_name, generator=row.generator, settings=row.settings, turns=last,
                    parent=name, parent_turn=last,
                )  # fmt: skip
                rows.copy_rows(db, row, new_id, last)
                return rows.read_info(db, self._row(db, new_name))
        except IntegrityError:
            raise ValueError(
                f"{self._named(new_name)} exists already; fork to another name, or delete it first"
            ) from None

    def delete(self, name: str) -> None:
        """Remove a session with all its turns and states. Raises SessionBusy if somebody has it open."""
        with self._transaction(write=True) as db:
            row = self._row(db, name)
            self._refuse_if_busy(db, row)
            rows.remove_session(db, row)

    def export(self, name: str) -> dict[str, Any]:
        """A session as plain JSON data, without its states (`StoredSession.export`). Raises like `load`."""
        return self.load(name).export()

    # -- all sessions -------------------------------------------------------------------------------------------

    def __contains__(self, name: str) -> bool:
        check_name(name)
        with self._transaction() as db:
            return db.scalar(select(sessions_table.c.id).where(sessions_table.c.name == name)) is not None

    def list(self) -> tuple[SessionInfo, ...]:
        """All sessions, the one last written to first."""
        with self._transaction() as db:
            newest_first = (sessions_table.c.updated.desc(), sessions_table.c.id.desc())
            found = db.execute(select(sessions_table).order_by(*newest_first)).all()
            return tuple(rows.read_info(db, row) for row in found)

    # -- helpers ------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _transaction(self, write: bool = False) -> Iterator[Connection]:
        """One transaction: committed at the end, undone if anything raises."""
        if self._closed.is_set():
            raise ValueError(f"{shown(self.url)}: this store was closed; open another SessionStore")
        engine, turn = (
            (self._writer, self._turn_to_write) if write else (self._engine, contextlib.nullcontext())
        )
        try:
            with turn, engine.begin() as db:
                yield db
        except IntegrityError:  # not the database's failure but its answer, for the caller to read
            raise
        except DBAPIError as error:
            raise explain(error, self.url) from error
        except PoolTimeout as error:
            raise StoreError(
                f"{shown(self.url)}: too many threads use the store at once ({error})"
            ) from error

    def _named(self, name: str) -> str:
        return f"session {name!r} in {shown(self.url)}"

    def _set(self, db: Connection, session_id: int, **values: Any) -> None:
        db.execute(update(sessions_table).where(sessions_table.c.id == session_id).values(values))

    def _row(self, db: Connection, name: str, read: bool = False) -> Row[Any]:
        check_name(name)
        row = rows.lock_session(db, sessions_table.c.name == name, read)
        if row is None:
            raise ValueError(f"there is no {self._named(name)}; `python -m inference sessions` lists them")
        return row

    def _open(self, name: str, generator_hash: str | None, settings: dict[str, Any] | None) -> Lease:
        lease = Lease(name)
        LIVE[lease.id] = lease  # before others can see it in the database
        with self._transaction(write=True) as db:
            row = rows.lock_session(db, sessions_table.c.name == name)
            if row is None and generator_hash is None:
                row = self._row(db, name)  # raises
            if row is not None:
                self._refuse_if_busy(db, row)
                if row.turns and generator_hash not in (None, row.generator):
                    raise ValueError(
                        f"{self._named(name)} was made with the generator {row.generator!r}, this one is "
                        f"{generator_hash!r}: a state means nothing to another model. Open it with the model that made "
                        "it, or replay its questions into a new session"
                    )
            values: dict[str, Any] = {
                "lease_id": lease.id, "lease_holder": Holder.here().to_json(), "lease_since": rows.timestamp(),
                "lease_expires": rows.clock(db) + self.lease_seconds,
            }  # fmt: skip
            if generator_hash is not None and (row is None or row.turns == 0):
                values |= {"generator": generator_hash, "settings": to_json(settings or {}, "the settings")}
            if row is None:
                lease.session_id = rows.insert_session(db, name=name, turns=0, **values)
            else:
                lease.session_id = row.id
                self._set(db, row.id, **values)
        return lease

    def _held(self, db: Connection, lease: Lease) -> Row[Any]:
        """The leased session's row, locked for this transaction. Raises SessionChanged if the lease was lost."""
        row = rows.lock_session(db, sessions_table.c.id == lease.session_id)
        if row is not None and row.lease_id == lease.id:
            return row
        other = None if row is None else rows.read_lease(row)
        what = "was closed or deleted" if other is None else f"was taken over by {other}"
        raise SessionChanged(
            f"{self._named(lease.name)} {what}, so nothing was changed; open it again to go on from what is stored"
        )

    def _refuse_if_busy(self, db: Connection, row: Row[Any]) -> None:
        lease = rows.read_lease(row)
        if lease is not None and (blocker := lease.blocker(rows.clock(db))) is not None:
            raise SessionBusy(f"{self._named(row.name)} is in use by {blocker}")

    def _check_turn(self, row: Row[Any], turn: int, first: int = 0) -> None:
        if not first <= turn <= row.turns:
            has = f"turns 1 to {row.turns}, not {turn}" if row.turns else f"no turns yet, so no turn {turn}"
            raise ValueError(f"{self._named(row.name)} has {has}")

    def _renew(self) -> None:
        """Push on the expiry of the leases somebody holds; free those whose object is gone."""
        held = {lease.id for lease in list(self._leases)}
        dropped = self._issued - held
        with self._transaction(write=True) as db:
            expires = rows.clock(db) + self.lease_seconds
            db.execute(update(sessions_table).where(_leased(held)).values(lease_expires=expires))
            db.execute(update(sessions_table).where(_leased(dropped)).values(_FREE))
        self._issued -= dropped


def _beat(store: weakref.ref[SessionStore], closed: threading.Event, seconds: float) -> None:
    """Push on the expiry of a store's leases until it is closed or gone."""
    while not closed.wait(seconds):
        if (alive := store()) is None:
            return
        try:
            alive._renew()
        except (
            StoreError,
            ValueError,
        ) as error:  # ValueError: closed just now. The next turn finds out if it matters
            _log.warning("leases could not be renewed: %s", error)
        del alive


def _leased(ids: set[str]) -> ColumnElement[bool]:
    return sessions_table.c.lease_id.in_(sorted(ids))
