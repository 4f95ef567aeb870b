"""The session store: whole turns or none, one writer at a time, and every fault named and survived.

Everything runs on SQLite; with TRACE_MEMORY_TEST_POSTGRES=postgresql://… (an empty database for tests) the tests that
use the fixture `place` run there too.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import multiprocessing
import os
import random
import resource
import signal
import socket
import sqlite3
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import sqlalchemy
from hypothesis import given, settings
from hypothesis import strategies as st

from inference import session_rows
from inference.session_lease import Holder
from inference.session_records import check_name
from inference.session_states import surplus_states
from inference.session_tables import sessions_table, store_url
from inference.sessions import SessionBusy, SessionChanged, SessionStore, StoredState, StoreError, Turn
from tests import session_workers
from tests.session_workers import check_whole, state_of, turn_of

SERVER = os.environ.get("TRACE_MEMORY_TEST_POSTGRES")


@pytest.fixture(params=["sqlite", "postgresql"] if SERVER else ["sqlite"])
def place(request, tmp_path):
    """Where a store of this test's own can be."""
    if request.param == "sqlite":
        return str(tmp_path / "sessions.db")
    engine = sqlalchemy.create_engine(SERVER)
    found = sqlalchemy.MetaData()
    found.reflect(engine)
    assert all(name.startswith("trace_memory_") for name in found.tables), (
        "this database is not one for tests"
    )
    found.drop_all(engine)
    engine.dispose()
    return SERVER


@pytest.fixture
def store(place):
    with SessionStore(place) as store:
        yield store


@pytest.mark.skipif(not SERVER, reason="TRACE_MEMORY_TEST_POSTGRES names no PostgreSQL database for tests")
def test_a_postgresql_server_is_used():
    with SessionStore(SERVER) as store:
        assert store._engine.dialect.name == "postgresql"


def fill(store, name="alice", turns=3, size=1000):
    """A session with the turns 1 to `turns`, and its lease."""
    lease = store.open(name, "generator", {"k": 5})
    for number in range(1, turns + 1):
        store.append_turn(lease, turn_of(number), state_of(number, size))
    return lease


# -- turns ------------------------------------------------------------------------------------------------------


def test_a_new_store_object_reads_what_was_appended(place):
    with SessionStore(place) as store:
        fill(store, size=60_000)
    with SessionStore(place) as store:
        stored = store.load("alice")
        check_whole(stored)
        assert stored.replay == () and stored.info.turns == 3 and stored.info.parent is None
        assert (stored.info.generator_hash, stored.info.settings) == ("generator", {"k": 5})
        assert stored.info.used_by is None and stored.info.created <= stored.info.updated


@pytest.mark.parametrize("text", ["", "\ud800 lone", "🧑‍🚀", "שלום ‏עולם", "a\x00b\n\r\x1b[0m", "Ω" * 10**6])
def test_any_text_comes_back(store, text):
    lease = store.open("alice", "generator", {"note": text})
    turn = Turn(1, text, text, [text], [{"sub_question": text, "deps": [1]}], {"p": text}, {"x": 0.1}, None)
    store.append_turn(lease, turn, b"")
    stored = store.load("alice")
    assert stored.turns == (turn,) and stored.state.blob == b"" and stored.info.settings == {"note": text}


def test_a_turn_out_of_order_is_refused_and_nothing_is_stored(store):
    lease = fill(store)
    for number in (-1, 0, 2, 3, 5):
        with pytest.raises(
            SessionChanged, match=f"turn {number} does not follow: .*'alice' .* ends with turn 3"
        ):
            store.append_turn(lease, turn_of(number), b"")
    assert store.load("alice").info.turns == 3


def test_the_same_call_again_stores_nothing_twice(store):
    """As after a server's connection that broke during the commit."""
    lease = fill(store)
    before = store.load("alice")
    store.append_turn(lease, turn_of(3), state_of(3, 1000))
    assert store.load("alice") == before
    for turn, state in ((Turn(3, "q", "a"), state_of(3, 1000)), (turn_of(3), b"other")):
        with pytest.raises(SessionChanged, match="turn 3 does not follow"):
            store.append_turn(lease, turn, state)


def test_a_record_that_is_no_json_is_refused_before_anything_is_written(store):
    lease = fill(store)
    for bad in ({1, 2}, float("nan"), b"x"):
        with pytest.raises(ValueError, match="record of turn 4 cannot be stored as JSON"):
            store.append_turn(lease, Turn(4, "q", "a", traces=bad), b"")
    assert store.load("alice").info.turns == 3


@pytest.mark.parametrize("step", ["write_turn", "write_state", "timestamp"])
def test_a_failure_between_the_steps_of_a_turn_leaves_none_of_it(store, monkeypatch, step):
    lease = fill(store)
    before = store.load("alice")

    def fail(*_):
        raise RuntimeError("injected")

    monkeypatch.setattr(session_rows, step, fail)
    with pytest.raises(RuntimeError, match="injected"):
        store.append_turn(lease, turn_of(4), state_of(4, 1000))
    monkeypatch.undo()
    assert store.load("alice") == before
    store.append_turn(lease, turn_of(4), state_of(4, 1000))
    assert store.load("alice").info.turns == 4


def test_the_database_itself_refuses_a_second_turn_of_a_number(tmp_path):
    with SessionStore(tmp_path / "s.db") as store:
        fill(store)
    with contextlib.closing(sqlite3.connect(tmp_path / "s.db")) as db, pytest.raises(sqlite3.IntegrityError):
        db.execute("INSERT INTO trace_memory_turns SELECT * FROM trace_memory_turns WHERE number = 2")


# -- fork, undo, list, delete, export ---------------------------------------------------------------------------


def test_a_fork_goes_its_own_way_and_the_original_stays(store):
    lease = fill(store, turns=6)
    before = store.load("alice")
    info = store.fork("alice", "bob", turn=5)
    assert (info.turns, info.parent, info.parent_turn, info.settings) == (5, "alice", 5, {"k": 5})
    assert store.load("bob").turns == before.turns[:5]
    assert store.load("bob").state == store.state("alice", 5)
    branch = store.open("bob", "generator")
    store.append_turn(branch, Turn(6, "other", "other"), b"other")
    assert store.load("alice") == before
    store.append_turn(lease, turn_of(7), state_of(7, 1000))
    assert (
        store.load("bob").turns[5] == Turn(6, "other", "other") and store.load("bob").state.blob == b"other"
    )
    assert store.fork("bob", "carol").turns == 6 and store.fork("alice", "dave", turn=0).turns == 0
    assert store.load("dave").state == StoredState(0)


def test_a_fork_that_cannot_be_made_changes_nothing(store):
    fill(store)
    store.fork("alice", "bob")
    before = store.list()
    with pytest.raises(ValueError, match=r"'bob' in .* exists already"):
        store.fork("alice", "bob")
    with pytest.raises(ValueError, match=r"'alice' in .* has turns 1 to 3, not 4"):
        store.fork("alice", "carol", turn=4)
    with pytest.raises(ValueError, match="there is no session 'zoe'"):
        store.fork("zoe", "carol")
    assert [info.name for info in store.list()] == [info.name for info in before]


def test_undo_takes_back_turn_by_turn(store):
    lease = fill(store)
    for number in (3, 2, 1):
        assert store.undo(lease) == turn_of(number)
        stored = store.load("alice")
        assert stored.info.turns == stored.state.turn == number - 1
        assert stored.state.blob == (state_of(number - 1, 1000) if number > 1 else None)
    with pytest.raises(ValueError, match="no turn to undo"):
        store.undo(lease)
    store.append_turn(lease, turn_of(1), b"again")
    assert store.load("alice").state.blob == b"again"


def test_list_delete_and_contains(store):
    assert store.list() == () and "alice" not in store
    lease = fill(store)
    fill(store, "bob", turns=1)
    assert [(info.name, info.turns, info.state_bytes) for info in store.list()] == [
        ("bob", 1, len(state_of(1, 1000))),
        ("alice", 3, 3 * len(state_of(1, 1000))),
    ]
    assert "alice" in store
    with pytest.raises(SessionBusy, match=rf"'alice' in .* is in use by this process \({os.getpid()}\)"):
        store.delete("alice")
    store.close_session(lease)
    store.delete("alice")
    assert [info.name for info in store.list()] == ["bob"] and "alice" not in store
    for action in (store.load, store.delete, store.export, store.open):
        with pytest.raises(ValueError, match="there is no session 'alice' in"):
            action("alice")
    with pytest.raises(SessionChanged, match="closed or deleted"):
        store.append_turn(lease, turn_of(4), b"")


def test_export_is_plain_json(store):
    fill(store, turns=2)
    data = json.loads(json.dumps(store.export("alice")))
    assert data["schema"] == "session/1" and data["name"] == "alice" and data["settings"] == {"k": 5}
    assert [turn["query"] for turn in data["turns"]] == ["query 1", "query 2"]
    assert data["turns"][1]["traces"] == turn_of(2).traces


@given(st.text(st.characters(exclude_categories=["Cc", "Cs", "Zl", "Zp"]), min_size=1, max_size=200))
def test_names_are_any_line_of_text(name):
    check_name(name)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("", "got 0 characters"),
        ("x" * 201, "got 201 characters"),
        ("a\nb", r"U\+000A at position 1"),
        ("\ud800", r"U\+D800 at position 0"),
        ("a\x00", r"U\+0000 at position 1"),
        ("a\u2028", r"U\+2028"),
        (7, "got int"),
    ],
)
def test_other_names_are_refused_everywhere(tmp_path, name, why):
    with SessionStore(tmp_path / "s.db") as store:
        fill(store, turns=1)
        for action in (
            lambda: store.open(name, "generator"),
            lambda: store.fork("alice", name),
            lambda: store.load(name),
            lambda: name in store,
        ):
            with pytest.raises(ValueError, match=why):
                action()


@pytest.mark.parametrize(
    "name", ["🧑‍🚀" * 40, "שלום", " ", "%_'\"; DROP TABLE x--", "é", "e\u0301", "x" * 200]
)
def test_odd_names_are_names(store, name):
    store.open(name, "generator")
    assert [info.name for info in store.list()] == [name] and name in store and "%" not in store


def test_a_session_belongs_to_its_generator(store):
    lease = store.open("alice", "one", {"k": 1})
    store.close_session(lease)
    lease = store.open("alice", "two", {"k": 2})  # no turn yet, so no state of another model
    store.append_turn(lease, turn_of(1), b"")
    store.close_session(lease)
    with pytest.raises(
        ValueError, match=r"'alice' in .* was made with the generator 'two', this one is 'three'"
    ):
        store.open("alice", "three")
    store.open("alice")  # whoever only reads or undoes needs no generator
    assert store.load("alice").info.settings == {"k": 2}


# -- states of earlier turns ------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 50), max_size=30), st.integers(0, 300))
def test_states_are_dropped_only_to_fit_and_the_newest_two_never(sizes, budget):
    by_turn = {3 * i + 1: size for i, size in enumerate(sizes)}
    dropped = surplus_states(by_turn, budget)
    kept = {turn: size for turn, size in by_turn.items() if turn not in dropped}
    assert set(list(by_turn)[-2:]) <= set(kept) and set(dropped) <= set(by_turn)
    assert sum(kept.values()) <= budget or len(kept) <= 2
    if sum(by_turn.values()) <= budget:
        assert dropped == []


def test_which_state_goes():
    """Room for 4 of 5: neighbours of 1 are 0 and 2, of 2 are 1 and 6, of 6 are 2 and 7; so 1 goes, then 6 (4 < 6)."""
    sizes = dict.fromkeys((1, 2, 6, 7, 8), 10)
    assert surplus_states(sizes, 40) == [1]
    assert surplus_states(sizes, 30) == [1, 6]
    assert surplus_states(sizes, 0) == [1, 2, 6]


@given(st.integers(3, 20), st.integers(1, 150))
@settings(max_examples=40)
def test_the_states_that_stay_are_spread_over_the_dialogue(room, turns):
    """Turn by turn, the longest way to a kept state stays within twice that of an even spread, plus one."""
    kept: dict[int, int] = {}
    for turn in range(1, turns + 1):
        kept[turn] = 1
        for gone in surplus_states(kept, room):
            del kept[gone]
        marks = [0, *kept]
        gap = max(b - a for a, b in itertools.pairwise(marks))
        assert gap <= 2 * -(-turn // (room - 1)) + 1


def test_a_dropped_state_says_from_where_to_replay(place):
    with SessionStore(place, state_budget=4000) as store:
        lease = fill(store, turns=10)  # 992 bytes each, so four stay
        kept = [turn for turn in range(11) if store.state("alice", turn).turn == turn]
        assert len(kept) == 5 and kept[0] == 0 and kept[-2:] == [9, 10]
        missing = next(turn for turn in range(3, 9) if turn not in kept)
        fork = store.fork("alice", "bob", turn=missing)
        stored = store.load("bob")
        assert fork.turns == missing and stored.state.turn < missing
        assert [turn.number for turn in stored.replay] == list(range(stored.state.turn + 1, missing + 1))
        branch = store.open("bob", "generator")
        store.put_state(branch, missing, state_of(missing, 1000))  # as the replay rebuilt it
        assert store.load("bob").state.blob == state_of(missing, 1000) and store.load("bob").replay == ()
        for turn in (0, 11):
            with pytest.raises(ValueError, match=f"has turns 1 to 10, not {turn}"):
                store.put_state(lease, turn, b"")
        assert store.list()[0].state_bytes <= 4000


# -- two writers ------------------------------------------------------------------------------------------------


def test_a_second_store_of_this_process_is_told_and_a_dropped_lease_is_free(place):
    with SessionStore(place) as one, SessionStore(place) as two:
        lease = fill(one)
        for store in (one, two):
            with pytest.raises(
                SessionBusy, match=rf"this process \({os.getpid()}\) since 20.*; close it there"
            ):
                store.open("alice", "generator")
        assert two.load("alice").info.used_by.startswith(f"process {os.getpid()} on ")
        two.fork("alice", "bob")  # reading is free
        del lease  # nobody can write with it any more
        again = two.open("alice", "generator")
        two.append_turn(again, turn_of(4), b"")
        assert one.load("alice").info.turns == 4


def test_closing_frees_and_a_closed_store_says_so(place):
    store = SessionStore(place)
    lease = fill(store)
    store.close()
    store.close()
    with pytest.raises(ValueError, match="this store was closed"):
        store.append_turn(lease, turn_of(4), b"")
    with SessionStore(place) as other:
        assert other.list()[0].used_by is None
        other.open("alice", "generator")


def elsewhere(store, name, **changes):
    """Make the lease of a session look like another process's."""
    with store._transaction(write=True) as db:
        row = session_rows.lock_session(db, sessions_table.c.name == name)
        holder = json.loads(row.lease_holder) | {
            k: v for k, v in changes.items() if k in ("pid", "host", "started")
        }
        values = {k: v for k, v in changes.items() if k.startswith("lease_")}
        store._set(db, row.id, lease_holder=json.dumps(holder), **values)


def test_a_holder_on_another_host_keeps_its_session_until_its_lease_ends(place):
    with SessionStore(place, lease_seconds=50) as one, SessionStore(place) as two:
        lease = fill(one)
        elsewhere(one, "alice", host="far.example", pid=4242)
        with pytest.raises(
            SessionBusy, match=r"in use by process 4242 on far.example since .* gone wait (49|50) s"
        ):
            two.open("alice", "generator")
        elsewhere(one, "alice", lease_expires=time.time() - 0.5)
        taken = two.open("alice", "generator")
        two.append_turn(taken, Turn(4, "q", "theirs"), b"theirs")
        with pytest.raises(SessionChanged, match=f"'alice' in .* was taken over by process {os.getpid()} on"):
            one.append_turn(lease, Turn(4, "q", "mine"), b"mine")
        with pytest.raises(SessionChanged, match="taken over"):
            one.undo(lease)
        one.close_session(lease)  # not its to give
        two.append_turn(taken, Turn(5, "q", "theirs"), b"theirs")
        assert [turn.answer for turn in two.load("alice").turns[3:]] == ["theirs", "theirs"]


def test_a_lease_that_ran_out_but_was_not_taken_still_writes(store):
    lease = fill(store)
    elsewhere(store, "alice", lease_expires=1.0)
    store.append_turn(lease, turn_of(4), b"")
    with store._transaction() as db:
        assert db.scalar(sqlalchemy.select(sessions_table.c.lease_expires)) > time.time()


def test_open_sessions_are_renewed_and_forgotten_ones_freed(place):
    with SessionStore(place, lease_seconds=0.15) as store:
        kept, dropped = fill(store), fill(store, "bob")
        elsewhere(store, "alice", lease_expires=1.0)
        del dropped
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline:
            with store._transaction() as db:
                columns = (sessions_table.c.name, sessions_table.c.lease_expires)
                expires = dict(db.execute(sqlalchemy.select(*columns)).all())
            if expires["alice"] > 1.0 and expires["bob"] is None:
                break
            time.sleep(0.02)
        assert expires["alice"] > 1.0 and expires["bob"] is None
        store.append_turn(kept, turn_of(4), b"")


def test_whether_a_holder_is_gone():
    here = Holder.here()
    assert here.is_gone() is False and Holder.from_json(here.to_json()) == here
    reused = Holder(here.pid, here.started - 3600, here.host, here.space)
    assert reused.is_gone() is True and not reused.same_process(here)
    assert Holder(2**22 + 5, here.started, here.host, here.space).is_gone() is True
    assert Holder(here.pid, here.started, "far.example", here.space).is_gone() is None
    assert Holder(here.pid, here.started, here.host, "pid:[1]").is_gone() is None
    child = os.posix_spawn(sys.executable, [sys.executable, "-c", ""], {})
    try:
        os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)  # ended, but still in the process table
        assert Holder(child, psutil.Process(child).create_time(), here.host, here.space).is_gone() is True
    finally:
        os.waitpid(child, 0)


def test_threads_share_a_store(place):
    """Eight sessions at once, and one turn that eight threads try to append: it is stored once."""
    with SessionStore(place, busy_seconds=60) as store, ThreadPoolExecutor(8) as pool:

        def dialogue(i):
            return fill(store, f"session {i}", turns=8, size=20_000)

        leases = list(pool.map(dialogue, range(8)))
        for i in range(8):
            assert [t.number for t in store.load(f"session {i}").turns] == list(range(1, 9))
        barrier = threading.Barrier(8)

        def append(i):
            barrier.wait()
            try:
                store.append_turn(leases[0], Turn(9, "q", str(i)), b"%d" % i)
            except SessionChanged:
                return None
            return str(i)

        won = [result for result in pool.map(append, range(8)) if result]
        stored = store.load("session 0")
        assert won == [stored.turns[8].answer] and stored.state.blob == won[0].encode()

        def open_it(_):
            barrier.wait()
            with contextlib.suppress(SessionBusy):
                return store.open("new", "generator")

        assert sum(lease is not None for lease in list(pool.map(open_it, range(8)))) == 1


@pytest.fixture(scope="module")
def processes():
    """Starts worker processes quickly: forked from a server that has imported what they need."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.session_workers"])

    def start(function, *arguments):
        ours, theirs = context.Pipe()
        process = context.Process(target=function, args=(*arguments, theirs), daemon=True)
        process.start()
        theirs.close()
        return process, ours

    return start


def test_a_running_process_keeps_its_session_and_a_killed_one_does_not(place, processes):
    holder, pipe = processes(session_workers.hold, place)
    pid = pipe.recv()
    with SessionStore(place) as store:
        with pytest.raises(SessionBusy) as error:
            store.open("alice", "generator")
        host = socket.gethostname()
        assert f"session 'alice' in {store.url.database if not SERVER else ''}" in str(error.value)
        assert f"is in use by process {pid} on {host} since 20" in str(error.value)
        os.kill(pid, signal.SIGKILL)
        holder.join()
        store.open("alice", "generator")


def test_processes_that_race_for_a_session_make_one_history(place, processes):
    SessionStore(place).close()
    workers = [processes(session_workers.race, place, 25) for _ in range(3)]
    for _, pipe in workers:
        pipe.send("go")
    done = [pipe.recv() for _, pipe in workers]
    for process, _ in workers:
        process.join()
    with SessionStore(place) as store:
        turns = store.load("alice").turns
    assert min(done) >= 0 and len(turns) == sum(done) > 0
    assert list(turns) == [turn_of(n) for n in range(1, len(turns) + 1)]


def test_kill_9_loses_no_turn_and_leaves_no_half_one(place, processes):
    """25 writers, each killed at a random moment of its work and followed by the next at once."""
    moments = random.Random(0)
    SessionStore(place).close()
    reported = 0
    for _ in range(25):
        writer, pipe = processes(session_workers.append_forever, place)
        assert pipe.recv() >= reported  # it opened the session of a killed process without waiting
        time.sleep(moments.uniform(0, 0.04))
        os.kill(writer.pid, signal.SIGKILL)
        with contextlib.suppress(EOFError):
            while True:
                reported = pipe.recv()
        writer.join()
        assert writer.exitcode == -signal.SIGKILL
        with SessionStore(place) as store:
            stored = store.load("alice")
            check_whole(stored)  # contiguous, every record whole, the state that of the last turn
            assert reported <= stored.info.turns <= reported + 1  # one may be stored and not yet reported
            reported = stored.info.turns
    assert reported > 25


# -- faults -----------------------------------------------------------------------------------------------------


def limited(store, pragma):
    """Run a pragma on the connections of a store."""
    with store._transaction() as db:
        db.exec_driver_sql(pragma)
    return store


def recovers(store, lease, message):
    """A turn fails with the message, nothing changes; `then` the same call works."""
    before = store.load("alice")
    with pytest.raises(StoreError, match=message) as error:
        store.append_turn(lease, turn_of(4), state_of(4, 400_000))
    assert str(store.url.database) in str(error.value)
    assert store.load("alice") == before

    def then():
        store.append_turn(lease, turn_of(4), state_of(4, 400_000))
        assert store.load("alice").turns == (*before.turns, turn_of(4))

    return then


def test_a_full_disk(tmp_path):
    with SessionStore(tmp_path / "s.db") as store:
        lease = fill(store)
        limited(store, "PRAGMA max_page_count = 40")
        then = recovers(store, lease, "full; free some space and try again")
        limited(store, "PRAGMA max_page_count = 1000000")
        then()


def test_a_quota_on_the_file(tmp_path):
    """The operating system refuses the write itself, in the middle of the log."""
    with SessionStore(tmp_path / "s.db") as store:
        lease = fill(store)
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (250_000, hard))
        try:
            then = recovers(store, lease, r"could not be read or written|is full")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        then()


def test_a_store_that_became_read_only(tmp_path):
    with SessionStore(tmp_path / "s.db") as store:
        lease = fill(store)
        limited(store, "PRAGMA query_only = ON")
        then = recovers(
            store, lease, "may not be written; change the permissions, or name another place with store="
        )
        limited(store, "PRAGMA query_only = OFF")
        then()


def test_a_store_that_another_program_locks(tmp_path):
    with SessionStore(tmp_path / "s.db", busy_seconds=0.05) as store:
        lease = fill(store)
        with contextlib.closing(sqlite3.connect(tmp_path / "s.db", isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            then = recovers(
                store, lease, "another program holds the file locked; close it there and try again"
            )
        then()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_that_may_not_be_written(tmp_path):
    (tmp_path / "closed").mkdir(mode=0o500)
    with pytest.raises(
        StoreError, match=r"closed/s.db: a session store cannot be opened .*Permission denied"
    ):
        SessionStore(tmp_path / "closed" / "s.db")


def test_a_place_where_no_file_can_be(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=r"file/s.db: a session store cannot be opened or made here"):
        SessionStore(tmp_path / "file" / "s.db")
    with pytest.raises(
        StoreError, match=r"Is a directory\); check that the directory may be written, or name"
    ):
        SessionStore(tmp_path)


def test_a_file_of_something_else_is_left_alone(tmp_path):
    text = tmp_path / "notes.txt"
    text.write_text("not a database, and longer than the sixteen bytes of the magic\n" * 20)
    with pytest.raises(StoreError, match=r"notes.txt: this is no session store, or a damaged one"):
        SessionStore(text)
    assert text.read_text().startswith("not a database")
    other = tmp_path / "other.db"
    with contextlib.closing(sqlite3.connect(other)) as db:
        db.execute("CREATE TABLE recipes (x)")
    with pytest.raises(
        ValueError, match=r"other.db: a database of something else \(it has the table recipes\)"
    ):
        SessionStore(other)


def test_another_schema_version_is_refused(place):
    with SessionStore(place) as store:
        fill(store)
        with store._transaction(write=True) as db:
            db.exec_driver_sql("UPDATE trace_memory_schema SET version = 7")
    with pytest.raises(ValueError, match=r"schema version 7; this trace-memory reads version 1"):
        SessionStore(place)


def test_a_damaged_file_is_an_error_and_the_sessions_that_can_be_read_are(tmp_path):
    path = tmp_path / "s.db"
    with SessionStore(path) as store:
        fill(store, size=400_000)
        fill(store, "bob", turns=1)
    content = path.read_bytes().replace(b"answer 2", b"answer 9")
    path.write_bytes(content)
    with SessionStore(path) as store:
        with pytest.raises(StoreError, match=r"'alice' in .*s.db is damaged: turn 2 is not what was written"):
            store.load("alice")
        assert store.load("bob").info.turns == 1
        assert store.fork("alice", "carol", turn=1).turns == 1
        assert store.load("carol").turns == (turn_of(1),)
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(StoreError, match=r"s.db: the file is damaged; keep a copy"):
        with SessionStore(path) as store:
            for info in store.list():
                store.load(info.name)


def test_a_damaged_state_is_found(store):
    fill(store)
    with store._transaction(write=True) as db:
        db.execute(
            sqlalchemy.text("UPDATE trace_memory_states SET blob = :b WHERE number = 3"), {"b": b"\x01"}
        )
    with pytest.raises(StoreError, match="the state after turn 3 is not what was written"):
        store.load("alice")
    assert store.state("alice", 2).blob == state_of(2, 1000)


def test_a_missing_turn_is_found(store):
    fill(store)
    with store._transaction(write=True) as db:
        db.exec_driver_sql("DELETE FROM trace_memory_turns WHERE number = 2")
    with pytest.raises(StoreError, match="turns 1 to 3 are not all there"):
        store.load("alice")


# -- where it is ------------------------------------------------------------------------------------------------


def test_the_default_place_and_its_permissions(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACE_MEMORY_HOME", str(tmp_path / "home"))
    with SessionStore() as store:
        fill(store)
        files = sorted((tmp_path / "home").iterdir())
        assert files[0].name == "sessions.db"
        assert all(file.stat().st_mode & 0o077 == 0 for file in files)  # dialogues are private


def test_places_that_can_be_no_store():
    assert store_url("~/x.db").database == str(Path("~/x.db").expanduser())
    for memory in (":memory:", "sqlite://", "sqlite:///:memory:"):
        with pytest.raises(ValueError, match="a session store outlives its process, so it needs a file"):
            SessionStore(memory)
    with pytest.raises(ValueError, match="an SQLite file or PostgreSQL, not mysql"):
        SessionStore("mysql://host/db")
    with pytest.raises(ValueError, match="URL cannot be read") as error:
        SessionStore("postgresql://u:secret@host:port/db")
    assert "secret" not in str(error.value)


def test_a_server_that_does_not_answer_is_an_error_without_the_password():
    pytest.importorskip("psycopg", reason="psycopg is not installed (the extra `postgres`)")
    with pytest.raises(
        StoreError, match=r"postgresql://u:\*\*\*@127.0.0.1:1/db: check that the database runs"
    ) as error:
        SessionStore("postgresql://u:secret@127.0.0.1:1/db")
    assert "secret" not in str(error.value)


def test_postgresql_without_its_driver_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(
        ValueError, match=r"psycopg is missing; install it with: pip install 'trace-memory\[postgres\]'"
    ):
        SessionStore("postgresql://u@127.0.0.1:1/db")
