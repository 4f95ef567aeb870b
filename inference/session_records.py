"""What the session store takes and gives: turns, states, what is known of a session, and its refusals.

Plain data; the text form of a turn's record is made and checked here. See `inference.sessions`.
"""

from __future__ import annotations

import hashlib
import json
import unicodedata
from dataclasses import asdict, dataclass, field
from typing import Any

from inference.session_tables import NAME_LENGTH, StoreError

EXPORT_SCHEMA = "session/1"


class SessionBusy(StoreError):
    """Another process, or another object of this one, is using the session."""


class SessionChanged(StoreError):
    """The stored session is not what the writer believed: its lease was taken, or another turn is last."""


@dataclass(frozen=True)
class Turn:
    """One answered turn, as it is stored. Everything but number, query and answer is any JSON value.

    Attributes:
        number: 1, 2, ….
        query: q_t, as the user wrote it.
        answer: a_t.
        drafts: what the generator wrote.
        traces: what became of it: the turn's part of the trace DAG, with sub-answers.
        paragraphs: the evidence.
        timings: seconds by stage.
        extra: whatever else the pipeline wants back.
    """

    number: int
    query: str
    answer: str
    drafts: Any = field(default_factory=list)
    traces: Any = field(default_factory=list)
    paragraphs: Any = field(default_factory=list)
    timings: Any = field(default_factory=dict)
    extra: Any = field(default_factory=dict)

    def to_record(self) -> str:
        """All but the number, as JSON in ASCII: any Python string survives. Raises ValueError for what is no JSON."""
        fields = asdict(self)
        return to_json(fields, f"the record of turn {fields.pop('number')}")

    @staticmethod
    def from_record(number: int, record: str) -> Turn:
        return Turn(number, **json.loads(record))


@dataclass(frozen=True)
class StoredState:
    """The state after `turn` (0: a fresh session, blob None). `sha256` is the blob's."""

    turn: int
    blob: bytes | None = None
    sha256: str | None = None


@dataclass(frozen=True)
class SessionInfo:
    """What is known of a session without its turns.

    Attributes:
        created, updated: ISO 8601, UTC.
        turns: number of the last turn.
        generator_hash: names the generator that the states belong to.
        settings: those the session was made with.
        parent, parent_turn: the session it was forked from, and after which turn.
        state_bytes: size of all kept states.
        used_by: who has it open ("process 4242 on HOST since …"); None if nobody has.
    """

    name: str
    created: str
    updated: str
    turns: int
    generator_hash: str
    settings: dict[str, Any]
    parent: str | None
    parent_turn: int | None
    state_bytes: int
    used_by: str | None


@dataclass(frozen=True)
class StoredSession:
    """All turns, and the newest kept state."""

    info: SessionInfo
    turns: tuple[Turn, ...]
    state: StoredState

    @property
    def replay(self) -> tuple[Turn, ...]:
        """The turns that the state has not read, mostly none."""
        return self.turns[self.state.turn :]

    def export(self) -> dict[str, Any]:
        """As plain JSON data: schema, name, generator_hash, settings, …, turns; no states."""
        info = asdict(self.info)
        for transient in ("state_bytes", "used_by"):
            del info[transient]
        return {"schema": EXPORT_SCHEMA, **info, "turns": [asdict(turn) for turn in self.turns]}


def check_name(name: str) -> None:
    """Raise ValueError unless `name` can be a session's: 1 to 200 characters of one line of text."""
    if not isinstance(name, str) or not 1 <= len(name) <= NAME_LENGTH:
        length = f"{len(name)} characters" if isinstance(name, str) else type(name).__name__
        raise ValueError(f"a session's name has 1 to {NAME_LENGTH} characters, got {length}")
    for at, character in enumerate(name):
        if unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp"):
            raise ValueError(
                f"the session name {name!r} has U+{ord(character):04X} at position {at}: control characters, "
                "line breaks and lone surrogates cannot be part of a name"
            )


def to_json(value: Any, what: str) -> str:
    """JSON in ASCII. Raises ValueError, naming `what`, for values that JSON has no form for."""
    try:
        return json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{what} cannot be stored as JSON: {error}") from None


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
