"""What other processes do to a session store in tests: append until killed, hold a session, race for it.

Imports no torch, so that a process is up in no time.
"""

from __future__ import annotations

import hashlib
import os

from inference.sessions import SessionBusy, SessionChanged, SessionStore, StoredSession, Turn


def turn_of(number: int, name: str = "alice") -> Turn:
    """The one right turn of this number: whoever reads it can tell whether all of it is there."""
    traces = [
        {"id": number, "sub_question": f"Who is {name} {number}?", "answer": "x" * (number * 97 % 4000)}
    ]
    return Turn(number, f"query {number}", f"answer {number}", traces=traces, timings={"reader": number / 8})


def state_of(number: int, size: int = 60_000) -> bytes:
    seed = hashlib.sha256(b"%d" % number).digest()
    return seed * (size // len(seed))


def check_whole(stored: StoredSession) -> None:
    """All turns are those of their numbers, and so is the state."""
    assert list(stored.turns) == [turn_of(n) for n in range(1, stored.info.turns + 1)]
    assert stored.state.turn == stored.info.turns
    assert stored.state.turn == 0 or stored.state.blob == state_of(stored.state.turn)


def append_forever(place: str, pipe) -> None:
    """Continue "alice"; send each turn's number once the store has said that it is stored."""
    with SessionStore(place) as store:
        lease = store.open("alice", "generator")
        number = store.load("alice").info.turns
        pipe.send(number)
        while True:
            number += 1
            store.append_turn(lease, turn_of(number), state_of(number))
            pipe.send(number)


def hold(place: str, pipe) -> None:
    """Keep "alice" open until told to end."""
    with SessionStore(place) as store:
        lease = store.open("alice", "generator")
        pipe.send(os.getpid())
        pipe.recv()
        store.close_session(lease)


def race(place: str, rounds: int, pipe) -> None:
    """Open "alice", append what seems the next turn, close, over and over; send how many turns were stored."""
    done = 0
    with SessionStore(place, busy_seconds=60) as store:
        pipe.recv()  # all start together
        for _ in range(rounds):
            try:
                lease = store.open("alice", "generator")
            except SessionBusy:
                continue
            try:
                number = store.load("alice").info.turns + 1
                store.append_turn(lease, turn_of(number), state_of(number, 1000))
                done += 1
            except SessionChanged:  # must not happen while the lease is held
                done = -(10**6)
            store.close_session(lease)
    pipe.send(done)
