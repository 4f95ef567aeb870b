"""The invariants of a built MuMu directory, checked on its rows and the source records only.

Written against the file format, not against the synthesiser: of `datamodules` only the normaliser, the text
cleaning and the table of which phrase could mean which type are used. I1..I16 number the invariants of the benchmark
(CMT-RAG, section 3.1 and appendix A, made testable).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

from datamodules.mumu_relations import could_denote
from datamodules.musique import clean_text, normalise

Row = dict[str, Any]
REF = re.compile(r"\[A(\d+)\]")


def rows(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def traces(dialogue: Row) -> list[Row]:
    return [trace for turn in dialogue["turns"] for trace in turn["traces"]]


def source_text(sources: dict[str, Row], trace: Row) -> str:
    gid, i = trace["source"]
    return clean_text(sources[gid]["question_decomposition"][i]["question"], i + 1)


def source_answers(sources: dict[str, Row], trace: Row) -> dict[int, str]:
    return {
        n + 1: node["answer"] for n, node in enumerate(sources[trace["source"][0]]["question_decomposition"])
    }


def check_dialogue(dialogue: Row, sources: dict[str, Row], corpus: dict[str, Row]) -> None:
    """I1-I10, I12 and the meaning of reference phrases, for one dialogue."""
    all_traces = traces(dialogue)
    by_id = {trace["id"]: trace for trace in all_traces}
    assert [trace["id"] for trace in all_traces] == list(range(1, len(all_traces) + 1))  # I1
    turn_of = {trace["id"]: turn["t"] for turn in dialogue["turns"] for trace in turn["traces"]}
    cross = 0
    for trace in all_traces:
        assert trace["deps"] == sorted(set(trace["deps"])) and all(
            1 <= d < trace["id"] for d in trace["deps"]
        )  # I1
        named = [int(k) for k in REF.findall(trace["sub_question"])]
        assert set(named) == set(trace["deps"])  # I2
        assert {int(k) for k in REF.findall(trace["keywords"])} == set(trace["deps"])
        assert len(trace["keywords"].split()) <= 12 and trace["keywords"]
        _check_substitution(trace, by_id, sources)  # I3, I8
        _check_evidence(trace, sources, corpus)  # I5
        cross += sum(turn_of[d] < turn_of[trace["id"]] for d in trace["deps"])
    if dialogue["stage"] == 1:
        assert cross == 0  # I12
    else:
        assert cross >= 1
    sids = [sources[t["source"][0]]["question_decomposition"][t["source"][1]]["id"] for t in all_traces]
    assert len(set(map(str, sids))) == len(sids)  # I9
    assert len({tuple(t["source"]) for t in all_traces}) == len(all_traces)
    _check_sessions(dialogue, turn_of)  # I9
    for turn in dialogue["turns"]:
        _check_turn(dialogue, turn, turn_of, sources)


def mentions_answer(trace: Row, text: str) -> bool:
    """Whether the trace refers to an earlier answer where its source names a subject `X >> ...` (mention splice)."""
    named = re.search(r"(?<!\w)#\d", text)
    return not named and re.match(r"\[A\d+\] >> ", trace["sub_question"]) is not None


def _check_substitution(trace: Row, by_id: dict[int, Row], sources: dict[str, Row]) -> None:
    text, own = source_text(sources, trace), source_answers(sources, trace)
    refs = [int(k) for k in re.findall(r"(?<!\w)#(\d+)\b", text)]
    named = [int(k) for k in REF.findall(trace["sub_question"])]
    if mentions_answer(trace, text):
        (k,) = named
        assert trace["sub_question"].replace(f"[A{k}]", by_id[k]["answer"]) == text  # I3
        assert trace["answer"] == own[trace["source"][1] + 1]
        return
    assert len(refs) == len(named)
    bridged = False
    for k, r in zip(named, refs, strict=True):
        assert normalise(by_id[k]["answer"]) == normalise(own[r])  # I8
        bridged |= by_id[k]["answer"] != own[r]
    filled = REF.sub(lambda m: by_id[int(m.group(1))]["answer"], trace["sub_question"])
    gold = re.sub(r"(?<!\w)#(\d+)\b", lambda m: own[int(m.group(1))], text)
    assert filled == gold if not bridged else normalise(filled) == normalise(gold)  # I3
    assert trace["answer"] == own[trace["source"][1] + 1]


def _check_evidence(trace: Row, sources: dict[str, Row], corpus: dict[str, Row]) -> None:
    gid, i = trace["source"]
    record = sources[gid]
    if "paragraphs" not in record:
        assert trace["paragraph_ids"] == []
        return
    (pid,) = trace["paragraph_ids"]
    found = corpus[pid]
    assert pid == "p_" + hashlib.sha1(f"{found['title']}\x1f{found['text']}".encode()).hexdigest()[:12]
    paragraph = record["paragraphs"][record["question_decomposition"][i]["paragraph_support_idx"]]
    assert (paragraph["title"], paragraph["paragraph_text"]) == (found["title"], found["text"])
    assert paragraph["is_supporting"]


def sessions(dialogue: Row, turn_of: dict[int, int]) -> list[list[Row]]:
    """Turns grouped by cross-turn dependencies (connected components)."""
    group = {turn["t"]: turn["t"] for turn in dialogue["turns"]}

    def root(t: int) -> int:
        while group[t] != t:
            t = group[t]
        return t

    for trace in traces(dialogue):
        for dep in trace["deps"]:
            group[root(turn_of[trace["id"]])] = root(turn_of[dep])
    out: dict[int, list[Row]] = {}
    for turn in dialogue["turns"]:
        out.setdefault(root(turn["t"]), []).append(turn)
    return list(out.values())


def _check_sessions(dialogue: Row, turn_of: dict[int, int]) -> None:
    """No answer of a turn twice in a session, no source graph in two sessions."""
    seen: set[str] = set()
    for session in sessions(dialogue, turn_of):
        answers = [normalise(turn["answer"]) for turn in session]
        assert len(set(answers)) == len(answers)
        gids = {trace["source"][0] for turn in session for trace in turn["traces"]}
        assert not gids & seen
        seen |= gids


def auxiliary(turn: Row) -> Row | None:
    """The relocated trace of a carrier turn."""
    return turn["traces"][0] if turn["operator"] == "SQR_B" else None


def _check_turn(dialogue: Row, turn: Row, turn_of: dict[int, int], sources: dict[str, Row]) -> None:
    own = {trace["id"]: trace for trace in turn["traces"]}
    last = turn["traces"][-1]
    assert turn["answer"] == last["answer"]  # I4
    needed, todo = set(), [last["id"]]
    while todo:
        k = todo.pop()
        if k in own and k not in needed:
            needed.add(k)
            todo += own[k]["deps"]
    aux = auxiliary(turn)
    assert set(own) - needed == ({aux["id"]} if aux else set())  # I6
    if aux:  # I7
        users = [turn_of[t["id"]] for t in traces(dialogue) if aux["id"] in t["deps"]]
        assert users and all(t > turn["t"] for t in users)
        assert aux["source"][0] != last["source"][0]
    graph = sources[last["source"][0]]
    whole = last["source"][1] == len(graph["question_decomposition"]) - 1
    assert turn["aliases"] == (graph["answer_aliases"] if whole else [])
    if turn["operator"] == "ORIG":
        assert turn["realiser"] == "original" and turn["reference_phrase"] is None
        return
    assert turn["realiser"] in ("template", "llm")
    hidden = [trace["answer"] for trace in turn["traces"]] + turn["aliases"]
    said = f" {normalise(turn['question'])} "
    assert not any(f" {normalise(answer)} " in said for answer in hidden if normalise(answer))  # I10
    assert not re.search(r"#\d|>>|\[A\d|\n", turn["question"]) and turn["question"].endswith("?")
    _check_phrase(dialogue, turn, own)


def _check_phrase(dialogue: Row, turn: Row, own: dict[int, Row]) -> None:
    """A reference phrase names exactly one earlier trace: the most recent one it could mean."""
    outside = {d for trace in turn["traces"] for d in trace["deps"] if d not in own}
    phrase = turn["reference_phrase"]
    if phrase is None:
        assert not outside and turn["operator"] in ("GS_A", "SQR_B")
        return
    (antecedent,) = outside
    assert re.search(rf"\b{re.escape(phrase.lower())}\b", turn["question"].lower())
    earlier = [t for t in traces(dialogue) if t["id"] < min(own)]
    meant = earlier[antecedent - 1]
    assert not any(could_denote(meant["type"], t["type"]) for t in earlier[antecedent:])


def check_directory(root: Path, sources: dict[str, dict[str, Row]], max_uses: int = 3) -> Counter[str]:
    """All dialogues of a built directory, its sizes, its use of sources and its splits; returns turns by operator."""
    corpus = {row["id"]: row for row in rows(root / "corpus.jsonl")}
    bounds = {"stage1": (1, 1, 4), "short": (3, 7, 64), "long": (6, 32, 128), "ultra": (33, 67, 10**6)}
    operators: Counter[str] = Counter()
    used: dict[str, set[str]] = {"train": set(), "dev": set(), "tune": set()}
    for stage, (low, high, most) in bounds.items():
        for path in sorted((root / stage).glob("*.jsonl")):
            uses: Counter[str] = Counter()
            split = path.stem
            for dialogue in rows(path):
                assert dialogue["split"] == split and low <= len(dialogue["turns"]) <= high
                assert len(traces(dialogue)) <= most
                check_dialogue(dialogue, sources[split], corpus)
                gids = {trace["source"][0] for trace in traces(dialogue)}
                uses.update(gids)
                used[split] |= gids
                operators.update(turn["operator"] for turn in dialogue["turns"])
            assert max(uses.values(), default=0) <= max_uses
    _check_split({split: used[split] for split in ("train", "dev")}, sources)
    _check_split(
        {"train": used["train"], "dev": used["tune"]},
        {"train": sources["train"], "dev": sources.get("tune", {})},
    )
    return operators


def _check_split(used: dict[str, set[str]], sources: dict[str, dict[str, Row]]) -> None:
    """I13: train and dev share no title, paragraph, sub-question, or bridge entity that is not a hub."""
    nodes: dict[str, list[tuple[Row, Row, bool]]] = {
        split: [
            (sources[split][gid], node, n < len(sources[split][gid]["question_decomposition"]) - 1)
            for gid in used[split]
            for n, node in enumerate(sources[split][gid]["question_decomposition"])
        ]
        for split in used
    }

    def titles(split: str) -> set[str]:
        return {
            node["title"] if "title" in node else g["paragraphs"][node["paragraph_support_idx"]]["title"]
            for g, node, _ in nodes[split]
        }

    assert not titles("train") & titles("dev")
    assert not {str(n["id"]) for _, n, _ in nodes["train"]} & {str(n["id"]) for _, n, _ in nodes["dev"]}
    frequency: Counter[str] = Counter()
    for split in used:
        for gid in used[split]:
            steps = sources[split][gid]["question_decomposition"][:-1]
            frequency.update({normalise(node["answer"]) for node in steps})
    total = sum(map(len, used.values()))
    shared = {normalise(n["answer"]) for _, n, b in nodes["train"] if b} & {
        normalise(n["answer"]) for _, n, b in nodes["dev"] if b
    }
    assert all(frequency[answer] > 0.005 * total for answer in shared)


class OracleReader:
    """Answers a resolved sub-question with the gold answer if the gold paragraph is given, else with nothing (I15)."""

    def __init__(self, sources: dict[str, Row]):
        self.known: dict[str, set[tuple[str, str | None]]] = {}
        for record in sources.values():
            for i, node in enumerate(record["question_decomposition"]):
                answers = {n + 1: s["answer"] for n, s in enumerate(record["question_decomposition"])}
                text = clean_text(node["question"], i + 1)
                text = re.sub(r"(?<!\w)#(\d+)\b", lambda m, a=answers: a[int(m.group(1))], text)
                self.known.setdefault(normalise(text), set()).add(
                    (normalise(node["answer"]), _pid(record, node))
                )

    def exact_match(self, dialogue: Row, deps_of: dict[int, list[int]] | None = None) -> float:
        """Share of turns answered as in the gold when each trace is read with its resolved text and paragraphs."""
        said: dict[int, str] = {}
        hits = 0
        for turn in dialogue["turns"]:
            for trace in turn["traces"]:
                swap = dict(zip(trace["deps"], (deps_of or {}).get(trace["id"], trace["deps"]), strict=True))
                resolved = REF.sub(lambda m, s=swap: said[s[int(m.group(1))]], trace["sub_question"])
                pids = trace["paragraph_ids"] or [None]
                found = [a for a, pid in self.known.get(normalise(resolved), ()) if pid in pids]
                right = normalise(trace["answer"])
                said[trace["id"]] = trace["answer"] if right in found else "unknown"
            hits += said[turn["traces"][-1]["id"]] == turn["answer"]
        return hits / len(dialogue["turns"])


def _pid(record: Row, node: Row) -> str | None:
    if "paragraphs" not in record:
        return None
    p = record["paragraphs"][node["paragraph_support_idx"]]
    return "p_" + hashlib.sha1(f"{p['title']}\x1f{p['paragraph_text']}".encode()).hexdigest()[:12]
