"""MuSiQue records in, checked reasoning graphs out.

In:  JSONL files in the official MuSiQue schema (`id, question, answer, answer_aliases, answerable, paragraphs,
     question_decomposition`).
Out: `SrcGraph`s whose references, shape and supporting paragraphs have been verified, and a count of the records left
     out, by reason.

A malformed record (a missing key, a wrong type, broken JSON) is an error that names file, line and field. A
well-formed record that cannot serve as a reasoning graph (unanswerable, no support index, edges that
contradict its shape) is rejected and counted. Source: MuSiQue (Trivedi et al., 2022); CMT-RAG, section 3.1 and
appendix A.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from inference.corpus import paragraph_id
from inference.jsonl import field, read_jsonl
from inference.metrics import normalise_squad

# 1-based edges of the six MuSiQue shapes: node -> nodes it refers to.
SHAPES: dict[str, dict[int, tuple[int, ...]]] = {
    "2hop": {1: (), 2: (1,)},
    "3hop1": {1: (), 2: (1,), 3: (2,)},
    "3hop2": {1: (), 2: (), 3: (1, 2)},
    "4hop1": {1: (), 2: (1,), 3: (2,), 4: (3,)},
    "4hop2": {1: (), 2: (), 3: (1, 2), 4: (3,)},
    "4hop3": {1: (), 2: (1,), 3: (), 4: (2, 3)},
}

REFERENCE = re.compile(r"(?<!\w)#(\d+)\b")
# The one sub-question whose "#1" is a rank, not a reference (MuSiQue's own conversion script treats it apart).
_LITERAL_RANK = "most listened to on spotify"


# SQuAD normalisation (lower case, no punctuation, no articles, single spaces), remembered: answers repeat a lot.
normalise = lru_cache(maxsize=1 << 18)(normalise_squad)


@dataclass(frozen=True)
class Paragraph:
    """One paragraph; `pid` is its `inference.corpus.paragraph_id`."""

    pid: str
    title: str
    text: str


@dataclass(frozen=True)
class SrcNode:
    """One sub-question of a source graph.

    `i` is its 0-based place in the graph, `refs` the 0-based nodes it refers to, sorted; in `text` they stand as `#k`
    with k = i + 1. `pid` is None for records without paragraphs. `type` is filled by `mumu_text.annotate`.
    """

    i: int
    sid: str
    text: str
    answer: str
    refs: tuple[int, ...]
    pid: str | None
    title: str
    type: str = "entity"


@dataclass(frozen=True)
class SrcGraph:
    """One MuSiQue question with its decomposition; the last node answers the question.

    `borrowed`: after its own nodes stands one that is not its own, an answer of an earlier turn (`borrow`).
    """

    gid: str
    shape: str
    question: str
    answer: str
    aliases: tuple[str, ...]
    nodes: tuple[SrcNode, ...]
    paragraphs: tuple[Paragraph, ...]
    borrowed: bool = False

    @property
    def final(self) -> int:
        return len(self.nodes) - 1 - self.borrowed


def clean_text(text: str, own_index: int) -> str:
    """A sub-question with tidy spacing in which every remaining `#k` is a real reference (1 <= k < own_index,
    1-based).

    Any other `#k` becomes `No. k`; a literal `[A12]` becomes `(A12)`, so that brackets mean references and
    nothing else.
    """
    rank_only = _LITERAL_RANK in text.lower()

    def literal(match: re.Match[str]) -> str:
        digits = match.group(1)
        is_reference = not rank_only and len(digits) < 6 and 1 <= int(digits) < own_index
        return match.group(0) if is_reference else f"No. {match.group(1)}"

    text = REFERENCE.sub(literal, text)
    text = re.sub(r"\[A(\d+)\]", r"(A\1)", text)
    return tidy(text)


def tidy(text: str) -> str:
    """Undo MuSiQue's tokenised spacing: `#2 's era`, `#1 , #2`, `created ?`, ``` ``Hey Jude'' ```."""
    text = text.replace("``", '"').replace("''", '"')
    text = re.sub(r"\s+", " ", text).strip()
    text = re.sub(r" (['’](?:s|re|ve|ll|d|m|t)\b)", r"\1", text)
    text = re.sub(r" n't\b", "n't", text)
    text = re.sub(r" ([,;:.?!])(?=\s|$)", r"\1", text)
    return re.sub(r"\( ", "(", re.sub(r" \)", ")", text))


def references(text: str) -> tuple[int, ...]:
    """The distinct k of the `#k` in a cleaned sub-question, ascending."""
    return tuple(sorted({int(k) for k in REFERENCE.findall(text)}))


def load_graphs(
    paths: Iterable[str | Path], allow_without_paragraphs: bool = False
) -> tuple[list[SrcGraph], Counter[str]]:
    """Read MuSiQue files.

    Returns the accepted graphs in file order and the number of rejected records by reason (`unanswerable`,
    `support_index`, `unknown_shape`, `shape`, `ids`, `answer`, `shared_paragraph`, `supporting_set`, `empty`,
    `duplicate_id`). With `allow_without_paragraphs`, a record that has no `paragraphs` and whose nodes carry a
    `title` is accepted for plans only.

    Raises FileNotFoundError for a missing file and ValueError (file, line, field) for a malformed record.
    """
    graphs: list[SrcGraph] = []
    rejected: Counter[str] = Counter()
    seen: set[str] = set()
    pool: dict[str, Paragraph] = {}
    for path in map(Path, paths):
        for where, record in read_jsonl(path):
            result = _parse(record, where, pool, allow_without_paragraphs)
            if isinstance(result, str):
                rejected[result] += 1
            elif result.gid in seen:
                rejected["duplicate_id"] += 1
            else:
                seen.add(result.gid)
                graphs.append(result)
    return graphs, rejected


def _parse(
    record: dict[str, Any], where: str, pool: dict[str, Paragraph], allow_without_paragraphs: bool
) -> SrcGraph | str:
    """One record as a graph, or the reason it is rejected."""
    gid = field(record, "id", str, where)
    question = tidy(field(record, "question", str, where))
    answer = field(record, "answer", str, where)
    answerable = field(record, "answerable", bool, where) if "answerable" in record else True
    aliases = field(record, "answer_aliases", list, where) if "answer_aliases" in record else []
    for n, alias in enumerate(aliases):
        if not isinstance(alias, str):
            raise ValueError(f"{where}: field 'answer_aliases[{n}]' must be str, got {type(alias).__name__}")
    steps = field(record, "question_decomposition", list, where)
    plan_only = "paragraphs" not in record
    if plan_only and not allow_without_paragraphs:
        raise ValueError(
            f"{where}: field 'paragraphs' is missing; records without paragraphs can be used for plans only: "
            "pass --allow-without-paragraphs (allow_without_paragraphs=True)"
        )
    paragraphs, supporting = ([], frozenset()) if plan_only else _paragraphs(record, where, pool)

    nodes: list[SrcNode] = []
    support: list[int | None] = []
    for n, step in enumerate(steps):
        name = f"question_decomposition[{n}]"
        if not isinstance(step, dict):
            raise ValueError(f"{where}: field '{name}' must be dict, got {type(step).__name__}")
        sid = str(field(step, "id", (int, str), where, name))
        text = clean_text(field(step, "question", str, where, name), n + 1)
        node_answer = field(step, "answer", str, where, name)
        pid, title = None, ""
        if plan_only:
            title = field(step, "title", str, where, name)
        else:
            index = field(step, "paragraph_support_idx", (int, type(None)), where, name)
            support.append(index)
            if index is not None and 0 <= index < len(paragraphs):
                pid, title = paragraphs[index].pid, paragraphs[index].title
        refs = tuple(k - 1 for k in references(text))
        nodes.append(SrcNode(n, sid, text, node_answer, refs, pid, title))

    if not answerable:
        return "unanswerable"
    if not plan_only and any(node.pid is None for node in nodes):
        return "support_index"
    shape, _, tail = gid.partition("__")
    if shape not in SHAPES:
        return "unknown_shape"
    if {n.i + 1: tuple(r + 1 for r in n.refs) for n in nodes} != SHAPES[shape]:
        return "shape"
    if tail.split("_") != [n.sid for n in nodes] or len({n.sid for n in nodes}) != len(nodes):
        return "ids"
    if nodes[-1].answer != answer:
        return "answer"
    if not question or any(not n.text or not normalise(n.answer) for n in nodes):
        return "empty"
    if not plan_only:
        if len(set(support)) != len(support):
            return "shared_paragraph"
        if frozenset(support) != supporting:
            return "supporting_set"
    return SrcGraph(gid, shape, question, answer, tuple(aliases), tuple(nodes), tuple(paragraphs))


def _paragraphs(
    record: dict[str, Any], where: str, pool: dict[str, Paragraph]
) -> tuple[list[Paragraph], frozenset[int]]:
    """The record's paragraphs in order of `idx` and the indices marked as supporting."""
    paragraphs: list[Paragraph] = []
    supporting: set[int] = set()
    items: Sequence[Any] = field(record, "paragraphs", list, where)
    for n, item in enumerate(items):
        name = f"paragraphs[{n}]"
        if not isinstance(item, dict):
            raise ValueError(f"{where}: field '{name}' must be dict, got {type(item).__name__}")
        idx = field(item, "idx", int, where, name)
        if idx != n:
            raise ValueError(f"{where}: field '{name}.idx' must be {n} (its position), got {idx}")
        title = field(item, "title", str, where, name)
        text = field(item, "paragraph_text", str, where, name)
        if field(item, "is_supporting", bool, where, name):
            supporting.add(idx)
        pid = paragraph_id(title, text)
        paragraphs.append(pool.setdefault(pid, Paragraph(pid, title, text)))
    return paragraphs, frozenset(supporting)
