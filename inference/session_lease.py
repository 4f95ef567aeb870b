"""Who may write to a session: one lease per session, held by one process at a time.

In:  the lease fields of a session's row (id, holder, since, expires). Out: whether another may take it, or why not.

A lease held on this machine is as alive as its process: that is looked up (process id and start time), so a killed
process blocks nobody. Of a holder elsewhere only the expiry is known, which its store pushes on (`SessionStore`).
Whoever is wrong about this loses a turn, never a history: each write checks the lease inside its transaction.
"""

from __future__ import annotations

import json
import math
import os
import socket
import weakref
from dataclasses import asdict, dataclass, field
from uuid import uuid4

import psutil

# Start times are derived from the boot time, which shifts when a clock is set.
_CLOCK_TOLERANCE = 5.0


@dataclass(frozen=True)
class Holder:
    """A process: its id, start time (seconds since the epoch), host, and process-id namespace (containers)."""

    pid: int
    started: float
    host: str
    space: str

    @staticmethod
    def here() -> Holder:
        """This process. Looked up anew each time, because a forked child is another one."""
        try:
            space = os.readlink("/proc/self/ns/pid")
        except OSError:  # not Linux
            space = ""
        return Holder(os.getpid(), psutil.Process().create_time(), socket.gethostname(), space)

    @staticmethod
    def from_json(text: str) -> Holder:
        return Holder(**json.loads(text))

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    def same_process(self, other: Holder) -> bool:
        return (self.pid, self.host, self.space) == (other.pid, other.host, other.space) and (
            abs(self.started - other.started) <= _CLOCK_TOLERANCE
        )

    def is_gone(self) -> bool | None:
        """Whether the process has ended; None where that cannot be seen from here."""
        here = Holder.here()
        if (self.host, self.space) != (here.host, here.space):
            return None
        try:
            process = psutil.Process(self.pid)
            if process.status() == psutil.STATUS_ZOMBIE:
                return True
            return abs(process.create_time() - self.started) > _CLOCK_TOLERANCE
        except psutil.NoSuchProcess:
            return True
        except psutil.AccessDenied:  # another user's process, so it runs
            return False


@dataclass(eq=False)
class Lease:
    """The right to write to one session; `SessionStore.open` gives it, `SessionStore.close_session` gives it back.

    It belongs to the object: when nobody holds the object any more, nobody can write with it, and it may be taken.
    """

    name: str
    session_id: int = -1
    id: str = field(default_factory=lambda: uuid4().hex)


# The leases that something in this process can still write with.
LIVE: weakref.WeakValueDictionary[str, Lease] = weakref.WeakValueDictionary()


@dataclass(frozen=True)
class LeaseRow:
    """The lease fields of a session's row: id, holder, since when (ISO), until when (epoch seconds)."""

    id: str
    holder: Holder
    since: str
    expires: float

    def __str__(self) -> str:
        return f"process {self.holder.pid} on {self.holder.host} since {self.since}"

    def blocker(self, now: float) -> str | None:
        """Who keeps others out at `now` (seconds since the epoch), and what to do; None if the lease may be taken."""
        if self.holder.same_process(Holder.here()):
            # A lease object that is gone (a notebook cell run twice) can write no more.
            return (
                f"this process ({self.holder.pid}) since {self.since}; close it there"
                if self.id in LIVE
                else None
            )
        gone = self.holder.is_gone()
        if gone is None and self.expires > now:
            left = math.ceil(self.expires - now)
            return f"{self}; close it there, or if that process is gone wait {left} s"
        if gone is False:
            return f"{self}; close it there, or end that process"
        return None
