"""The MuSiQue loader: references, shapes, rejections, and errors that say where."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from datamodules.musique import clean_text, load_graphs, normalise, references, tidy
from inference.corpus import paragraph_id
from tests.mumu_sources import records, write


@pytest.fixture
def record() -> dict[str, Any]:
    return copy.deepcopy(next(r for r in records(1, 20) if r["id"].startswith("3hop1")))


def load(tmp_path: Path, *items: dict[str, Any], **options: Any):
    return load_graphs([write(tmp_path / "source.jsonl", list(items))], **options)


def test_every_shape_is_parsed_to_its_edges(tmp_path):
    graphs, rejected = load(tmp_path, *records(3, 60))
    assert not rejected and len(graphs) == 60
    edges = {
        "2hop": [(), (0,)], "3hop1": [(), (0,), (1,)], "3hop2": [(), (), (0, 1)],
        "4hop1": [(), (0,), (1,), (2,)], "4hop2": [(), (), (0, 1), (2,)], "4hop3": [(), (0,), (), (1, 2)],
    }  # fmt: skip
    assert {g.shape for g in graphs} == set(edges)
    for graph in graphs:
        assert [node.refs for node in graph.nodes] == edges[graph.shape]
        assert graph.answer == graph.nodes[graph.final].answer
        assert all(n.pid == paragraph_id(n.title, f"Fact {n.sid}: {n.answer}.") for n in graph.nodes)


@pytest.mark.parametrize(
    ("text", "own", "clean", "refs"),
    [
        ("When did #1 , #2 and Nissan open plants ?", 3, "When did #1, #2 and Nissan open plants?", (1, 2)),
        ("What was the #2 of #1 's era later known as?", 3, "What was the #2 of #1's era later known as?", (1, 2)),
        ("who is #1 most listened to on spotify", 2, "who is No. 1 most listened to on spotify", ()),
        ("which song was #3 on the chart of #1", 2, "which song was No. 3 on the chart of #1", (1,)),
        ("where is #0 and C#2 of #1", 2, "where is No. 0 and C#2 of #1", (1,)),
        ("see [A12] in #1", 2, "see (A12) in #1", (1,)),
        ("#10 or #1", 11, "#10 or #1", (1, 10)),
        ("what song did he write ``Hey Jude '' ( 1968 )", 1, 'what song did he write "Hey Jude " (1968)', ()),
    ],
)  # fmt: skip
def test_references_and_literals(text, own, clean, refs):
    assert clean_text(text, own) == clean
    assert references(clean) == refs


@given(st.text(alphabet="ab #12['’s,.?!`()]A\n\u00e9 ", max_size=40), st.integers(1, 5))
def test_cleaning_is_stable_and_leaves_only_real_references(text, own):
    clean = clean_text(text, own)
    assert all(1 <= k < own for k in references(clean))
    assert "\n" not in clean and clean == clean.strip()
    assert tidy(clean).count("#") == clean.count("#")


def test_normalise_is_squad():
    assert normalise("The  Beatles' (An) album!") == "beatles album"


def test_a_rank_literal_is_no_edge(tmp_path, record):
    record["question_decomposition"][0]["question"] = "who is #1 most listened to on spotify"
    graphs, rejected = load(tmp_path, record)
    assert not rejected and graphs[0].nodes[0].refs == () and "No. 1" in graphs[0].nodes[0].text


def change(record: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """Set (or with `...` delete) a dotted path like `paragraphs.0.title`."""
    record = copy.deepcopy(record)
    *way, last = [int(p) if p.isdigit() else p for p in path.split(".")]
    target: Any = record
    for step in way:
        target = target[step]
    if value is ...:
        del target[last]
    else:
        target[last] = value
    return record


@pytest.mark.parametrize(
    ("path", "value", "field"),
    [
        ("id", ..., "'id' is missing"),
        ("question", 3, "'question' must be str, got int"),
        ("answer", ..., "'answer' is missing"),
        ("answerable", "yes", "'answerable' must be bool"),
        ("answer_aliases", "x", "'answer_aliases' must be list"),
        ("answer_aliases", [1], "'answer_aliases[0]' must be str"),
        ("paragraphs", {}, "'paragraphs' must be list"),
        ("paragraphs.1", "text", "'paragraphs[1]' must be dict"),
        ("paragraphs.1.idx", 0, "'paragraphs[1].idx' must be 1"),
        ("paragraphs.0.idx", False, "'paragraphs[0].idx' must be int, got bool"),
        ("paragraphs.0.title", None, "'paragraphs[0].title' must be str"),
        ("paragraphs.0.is_supporting", ..., "'paragraphs[0].is_supporting' is missing"),
        ("question_decomposition", ..., "'question_decomposition' is missing"),
        ("question_decomposition.2.question", ..., "'question_decomposition[2].question' is missing"),
        ("question_decomposition.1.answer", 7, "'question_decomposition[1].answer' must be str"),
        ("question_decomposition.1.paragraph_support_idx", "0", "paragraph_support_idx' must be int or null"),
    ],
)
def test_malformed_records_name_file_line_and_field(tmp_path, record, path, value, field):
    good = copy.deepcopy(record)
    with pytest.raises(ValueError) as error:
        load(tmp_path, good, change(record, path, value))
    assert "source.jsonl, line 2" in str(error.value) and field in str(error.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"id": \n', "line 1: not valid JSON"),
        (b"[1]\n", "line 1: expected a JSON object"),
        (b'\n{"id": "\xff"}\n', "line 2: not UTF-8"),
        (b"\n" + b"[" * 100_000, "line 2: not a record"),
        (b'{"id": ' + b"9" * 10_000 + b"}", "line 1: not a record"),
        (b'{"id": "\\udc00"}', "line 1: a string holds half a surrogate pair"),
    ],
)
def test_broken_lines_name_file_and_line(tmp_path, content, message):
    path = tmp_path / "broken.jsonl"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"broken\.jsonl, {message}"):
        load_graphs([path])


def test_a_byte_order_mark_and_windows_lines_are_read(tmp_path, record):
    path = tmp_path / "windows.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps({**record, "question": "\U0001f600?"}).encode() + b"\r\n")
    graphs, _ = load_graphs([path])
    assert graphs[0].question == "\U0001f600?"


def test_a_number_of_thousands_of_digits_is_no_reference():
    assert clean_text("who is #" + "9" * 5000, 2) == "who is No. " + "9" * 5000


def test_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere\.jsonl"):
        load_graphs([tmp_path / "nowhere.jsonl"])


@pytest.mark.parametrize(
    ("path", "value", "reason"),
    [
        ("answerable", False, "unanswerable"),
        ("question_decomposition.1.paragraph_support_idx", None, "support_index"),
        ("question_decomposition.1.paragraph_support_idx", 99, "support_index"),
        ("question_decomposition.1.question", "who is it", "shape"),
        ("question_decomposition.0.id", 424242, "ids"),
        ("answer", "something else", "answer"),
        ("question", " ", "empty"),
        ("question_decomposition.0.answer", "the", "empty"),
    ],
)
def test_unusable_records_are_counted(tmp_path, record, path, value, reason):
    graphs, rejected = load(tmp_path, change(record, path, value))
    assert graphs == [] and rejected == {reason: 1}


def test_more_reasons_to_reject(tmp_path, record):
    unknown = change(record, "id", "5hop__" + record["id"].partition("__")[2])
    steps = record["question_decomposition"]
    twice = change(
        record, "question_decomposition.1.paragraph_support_idx", steps[0]["paragraph_support_idx"]
    )
    spare = next(p["idx"] for p in record["paragraphs"] if not p["is_supporting"])
    marked = change(record, f"paragraphs.{spare}.is_supporting", True)
    marked["id"] = record["id"]
    _, rejected = load(tmp_path, unknown, twice, marked, record, record)
    assert rejected == {"unknown_shape": 1, "shared_paragraph": 1, "supporting_set": 1, "duplicate_id": 1}


def test_supporting_paragraphs_alone_are_enough(tmp_path, record):
    kept = [p for p in record["paragraphs"] if p["is_supporting"]]
    place = {p["idx"]: n for n, p in enumerate(kept)}
    record["paragraphs"] = [{**p, "idx": n} for n, p in enumerate(kept)]
    for step in record["question_decomposition"]:
        step["paragraph_support_idx"] = place[step["paragraph_support_idx"]]
    graphs, rejected = load(tmp_path, record)
    assert not rejected and len(graphs[0].paragraphs) == 3


def test_records_without_paragraphs(tmp_path, record):
    del record["paragraphs"]
    for n, step in enumerate(record["question_decomposition"]):
        del step["paragraph_support_idx"]
        step["title"] = f"Title {n}"
    with pytest.raises(ValueError, match=r"'paragraphs' is missing.*--allow-without-paragraphs"):
        load(tmp_path, record)
    graphs, rejected = load(tmp_path, record, allow_without_paragraphs=True)
    assert not rejected and [n.title for n in graphs[0].nodes] == ["Title 0", "Title 1", "Title 2"]
    assert all(n.pid is None for n in graphs[0].nodes) and graphs[0].paragraphs == ()
    del record["question_decomposition"][1]["title"]
    with pytest.raises(ValueError, match=r"question_decomposition\[1\].title' is missing"):
        load(tmp_path, record, allow_without_paragraphs=True)


@pytest.mark.shared
def test_real_musique(shared_data):
    folder = shared_data / "musique"
    for name, count in (("train", 1126), ("dev", 292)):
        graphs, rejected = load_graphs([folder / f"{name}.jsonl"])
        assert len(graphs) == count and not rejected
        raw = [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
        assert [g.gid for g in graphs] == [r["id"] for r in raw]
        for graph, record in zip(graphs, raw, strict=True):
            support = {p["title"] for p in record["paragraphs"] if p["is_supporting"]}
            assert {n.title for n in graph.nodes} == support and len(graph.paragraphs) == len(
                record["paragraphs"]
            )
    for name, count in (("train", 553), ("dev", 222)):
        graphs, rejected = load_graphs(
            [folder / f"{name}_decompositions.jsonl"], allow_without_paragraphs=True
        )
        assert len(graphs) == count and not rejected
