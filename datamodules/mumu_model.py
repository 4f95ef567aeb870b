"""The rows of a built MuMu directory: dialogues of turns of traces, written and read.

In / out: JSONL, sorted keys, `schema` = `SCHEMA`; one dialogue a line. Trace ids run 1..K over the dialogue in
order of appearance; a reference to trace 20 stands as `[A20]` in `sub_question` and `keywords` and as 20 in `deps`.
Source: CMT-RAG, section 3.1 (trace = sub-question, keywords, dependencies) and appendix A.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inference.jsonl import field, read_jsonl

SCHEMA = "mumu-dialogue/1"
SPEC_VERSION = "1"
OPERATORS = ("ORIG", "GS_A", "GS_C", "SQR_B", "SQR_C")
STAGE_OF: dict[str, int | str] = {"stage1": 1, "short": 2, "long": 3, "ultra": "ultra"}
TRACE_REFERENCE = re.compile(r"\[A(\d+)\]")


@dataclass(frozen=True)
class Trace:
    """One trace: `id` and `deps` are dialogue-wide; `source` = (source graph id, 0-based node)."""

    id: int
    sub_question: str
    keywords: str
    deps: tuple[int, ...]
    paragraph_ids: tuple[str, ...]
    answer: str
    type: str
    source: tuple[str, int]


@dataclass(frozen=True)
class Turn:
    """One user question and its gold plan. `t` counts from 1; `answer` is the answer of the last trace."""

    t: int
    question: str
    answer: str
    aliases: tuple[str, ...]
    operator: str
    realiser: str
    reference_phrase: str | None
    ambiguous: bool
    traces: tuple[Trace, ...]


@dataclass(frozen=True)
class Dialogue:
    """One dialogue; `stage` is 1, 2, 3 or "ultra", `split` is "train" or "dev"."""

    id: str
    split: str
    stage: int | str
    seed: int
    turns: tuple[Turn, ...]

    @property
    def traces(self) -> tuple[Trace, ...]:
        return tuple(trace for turn in self.turns for trace in turn.traces)

    def cross_turn_edges(self) -> int:
        """Number of dependencies that point to an earlier turn (X-E of Table 6)."""
        count, first = 0, 1
        for turn in self.turns:
            count += sum(dep < first for trace in turn.traces for dep in trace.deps)
            first += len(turn.traces)
        return count


def to_row(dialogue: Dialogue) -> dict[str, Any]:
    """A dialogue as the JSON object of a built MuMu directory."""
    return {
        "id": dialogue.id,
        "split": dialogue.split,
        "stage": dialogue.stage,
        "seed": dialogue.seed,
        "schema": SCHEMA,
        "turns": [
            {
                "t": turn.t,
                "question": turn.question,
                "answer": turn.answer,
                "aliases": list(turn.aliases),
                "operator": turn.operator,
                "realiser": turn.realiser,
                "reference_phrase": turn.reference_phrase,
                "ambiguous": turn.ambiguous,
                "traces": [
                    {
                        "id": trace.id,
                        "sub_question": trace.sub_question,
                        "keywords": trace.keywords,
                        "deps": list(trace.deps),
                        "paragraph_ids": list(trace.paragraph_ids),
                        "answer": trace.answer,
                        "type": trace.type,
                        "source": list(trace.source),
                    }
                    for trace in turn.traces
                ],
            }
            for turn in dialogue.turns
        ],
    }


def dump_line(record: dict[str, Any]) -> str:
    """One JSONL line: sorted keys, no spaces, UTF-8 kept."""
    return json.dumps(record, sort_keys=True, ensure_ascii=False, separators=(",", ":")) + "\n"


def load_dialogues(path: str | Path) -> list[Dialogue]:
    """Read a file of dialogues.

    Raises FileNotFoundError, or ValueError naming file, line and field: missing or mistyped fields, an unknown
    schema, ids that are not 1..K, a dependency that is not an earlier trace, a reference that is not a dependency.
    """
    dialogues = [_dialogue(record, where) for where, record in read_jsonl(Path(path))]
    if not dialogues:
        raise ValueError(f"{path}: holds no dialogue; build it with `python -m datamodules.mumu`")
    return dialogues


def _dialogue(record: dict[str, Any], where: str) -> Dialogue:
    schema = field(record, "schema", str, where)
    if schema != SCHEMA:
        raise ValueError(
            f"{where}: field 'schema' is '{schema}', this version reads '{SCHEMA}'; rebuild the directory"
        )
    turns, next_id = [], 1
    for n, item in enumerate(_objects(record, "turns", where)):
        turn = _turn(item, where, f"turns[{n}]", n + 1, next_id)
        next_id += len(turn.traces)
        turns.append(turn)
    if not turns:
        raise ValueError(f"{where}: field 'turns' is empty")
    return Dialogue(
        field(record, "id", str, where),
        field(record, "split", str, where),
        field(record, "stage", (int, str), where),
        field(record, "seed", int, where),
        tuple(turns),
    )


def _turn(item: dict[str, Any], where: str, name: str, number: int, first_id: int) -> Turn:
    if (t := field(item, "t", int, where, name)) != number:
        raise ValueError(f"{where}: field '{name}.t' must be {number}, got {t}")
    operator = field(item, "operator", str, where, name)
    if operator not in OPERATORS:
        raise ValueError(
            f"{where}: field '{name}.operator' must be one of {', '.join(OPERATORS)}, got '{operator}'"
        )
    traces = tuple(
        _trace(trace, where, f"{name}.traces[{n}]", first_id + n)
        for n, trace in enumerate(_objects(item, "traces", where, name))
    )
    if not traces:
        raise ValueError(f"{where}: field '{name}.traces' is empty; a turn needs at least one trace")
    question = field(item, "question", str, where, name)
    if not question.strip():
        raise ValueError(f"{where}: field '{name}.question' is empty")
    return Turn(
        t,
        question,
        field(item, "answer", str, where, name),
        _list(item, "aliases", str, where, name),
        operator,
        field(item, "realiser", str, where, name),
        field(item, "reference_phrase", (str, type(None)), where, name),
        field(item, "ambiguous", bool, where, name),
        traces,
    )


def _trace(item: dict[str, Any], where: str, name: str, expected: int) -> Trace:
    if (own := field(item, "id", int, where, name)) != expected:
        raise ValueError(f"{where}: field '{name}.id' must be {expected} (ids run 1..K in order), got {own}")
    sub_question = field(item, "sub_question", str, where, name)
    if not sub_question.strip():
        raise ValueError(f"{where}: field '{name}.sub_question' is empty")
    deps = _list(item, "deps", int, where, name)
    if len(set(deps)) != len(deps) or any(not 1 <= dep < own for dep in deps):
        raise ValueError(
            f"{where}: field '{name}.deps' must name distinct earlier traces (1..{own - 1}), got {list(deps)}"
        )
    named = {k.lstrip("0") or "0" for k in TRACE_REFERENCE.findall(sub_question)}
    if named != set(map(str, deps)):
        shown = ", ".join(f"[A{k[:9]}]" for k in sorted(named, key=lambda k: (len(k), k))) or "no trace"
        raise ValueError(
            f"{where}: field '{name}.deps' is {list(deps)} but the sub-question refers to {shown}"
        )
    source = field(item, "source", list, where, name)
    if len(source) != 2 or not isinstance(source[0], str) or not isinstance(source[1], int):
        raise ValueError(f"{where}: field '{name}.source' must be [graph id, node number], got {source}")
    return Trace(
        own,
        sub_question,
        field(item, "keywords", str, where, name),
        deps,
        _list(item, "paragraph_ids", str, where, name),
        field(item, "answer", str, where, name),
        field(item, "type", str, where, name),
        (source[0], source[1]),
    )


def _list(record: dict[str, Any], key: str, kind: type, where: str, parent: str) -> tuple[Any, ...]:
    values = field(record, key, list, where, parent)
    for n, value in enumerate(values):
        if not isinstance(value, kind) or isinstance(value, bool):
            raise ValueError(
                f"{where}: field '{parent}.{key}[{n}]' must be {kind.__name__}, got {type(value).__name__}"
            )
    return tuple(values)


def _objects(record: dict[str, Any], key: str, where: str, parent: str = "") -> list[dict[str, Any]]:
    values = field(record, key, list, where, parent)
    for n, value in enumerate(values):
        if not isinstance(value, dict):
            name = f"{parent}.{key}" if parent else key
            raise ValueError(f"{where}: field '{name}[{n}]' must be dict, got {type(value).__name__}")
    return values
