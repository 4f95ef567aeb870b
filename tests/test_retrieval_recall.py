"""Recall of gold paragraphs: references replaced by gold answers, hand-counted shares, and the command."""

from __future__ import annotations

import json

import pytest

from datamodules.musique import load_graphs
from datamodules.retrieval_recall import SubQuestion, from_dialogues, from_graphs, main, recall
from inference.corpus import paragraph_id
from inference.metrics import wilson
from inference.retrieval import Hit
from tests.mumu_sources import records, write


class Fixed:
    """Finds the same ids for every query."""

    def __init__(self, *ids: str):
        self.ids, self.queries = ids, []

    def search(self, queries, k):
        self.queries += queries
        return [[Hit(one, 1.0) for one in self.ids[:k]] for _ in queries]


def test_recall_is_the_share_of_gold_paragraphs_found():
    """Gold at ranks 1, 2, 3 and nowhere of (a, b, c): 1/4, 2/4 and 3/4 at k = 1, 2, 5."""
    questions = [SubQuestion(one, (one,)) for one in "abcd"]
    retriever = Fixed("a", "b", "c")
    results = recall(retriever, questions, [1, 2, 5])
    assert [results[f"recall@{k}"]["value"] for k in (1, 2, 5)] == [0.25, 0.5, 0.75]
    assert retriever.queries == list("abcd")
    low, high = wilson(3, 4)
    assert results["recall@5"] == {"value": 0.75, "n": 4, "low": low, "high": high}
    with pytest.raises(ValueError, match="no sub-question"):
        recall(retriever, [], [5])


def test_several_gold_paragraphs_count_in_shares():
    """Of (a, b): both, one of two, none: (1 + 1/2 + 0) / 3."""
    questions = [SubQuestion("x", ("a", "b")), SubQuestion("y", ("b", "z")), SubQuestion("z", ("y", "z"))]
    figure = recall(Fixed("a", "b"), questions, [5])["recall@5"]
    assert figure["value"] == pytest.approx(0.5) and 0 <= figure["low"] < 0.5 < figure["high"] <= 1


def test_references_are_replaced_by_gold_answers(tmp_path):
    items = records(3, 30)
    graphs, _ = load_graphs([write(tmp_path / "m.jsonl", items)])
    questions = from_graphs(graphs)
    assert len(set(questions)) == len(questions) > 30
    assert all("#" not in question.text for question in questions)
    graph = next(g for g in graphs if g.shape == "2hop")
    second = graph.nodes[1]
    text = second.text.replace("#1", graph.nodes[0].answer)
    assert (
        SubQuestion(text, (paragraph_id(second.title, f"Fact {second.sid}: {second.answer}."),)) in questions
    )


def test_the_command_on_musique_files_and_on_a_built_directory(tmp_path, capsys):
    from datamodules.mumu import build

    train, dev = (
        write(tmp_path / "train.jsonl", records(3, 60)),
        write(tmp_path / "dev.jsonl", records(4, 40, "B")),
    )
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text(json.dumps({"id": "x", "title": "Other", "text": "Something else."}) + "\n")
    arguments = ["--musique", dev, "--distractors", train, "--corpus", corpus, "--index", tmp_path / "i",
                 "--kind", "bm25", "--k", "1", "5", "--json", tmp_path / "r.json"]  # fmt: skip
    assert main([str(one) for one in arguments]) == 0
    first = capsys.readouterr().out
    graphs, _ = load_graphs([dev])
    others, _ = load_graphs([train])
    paragraphs = {p.pid for g in [*graphs, *others] for p in g.paragraphs}
    assert first.startswith(f"{len(from_graphs(graphs))} sub-questions, {len(paragraphs) + 1} paragraphs\n")
    figures = json.loads((tmp_path / "r.json").read_text())
    assert list(figures) == ["recall@1", "recall@5"] and figures["recall@1"]["n"] == len(from_graphs(graphs))
    assert main([str(one) for one in arguments]) == 0
    assert capsys.readouterr().out == f"using the index in {tmp_path / 'i'}\n{first}"

    build([train], [dev], tmp_path / "mumu", short=4, long=0, ultra=0, short_dev=6, long_dev=0)
    assert main(["--mumu", str(tmp_path / "mumu"), "--index", str(tmp_path / "j"), "--kind", "bm25"]) == 0
    from datamodules.mumu_model import load_dialogues

    dialogues = [
        d for stage in ("stage1", "short") for d in load_dialogues(tmp_path / "mumu" / stage / "dev.jsonl")
    ]
    questions = from_dialogues(dialogues)
    assert all("[A" not in question.text and question.gold for question in questions)
    assert set(questions) <= set(from_graphs(graphs))
    assert capsys.readouterr().out.startswith(f"{len(questions)} sub-questions, ")


def test_errors_are_one_line(tmp_path, capsys):
    assert main(["--mumu", str(tmp_path), "--index", str(tmp_path / "i")]) == 2
    assert main(["--musique", str(tmp_path / "none.jsonl"), "--index", str(tmp_path / "i")]) == 2
    assert main(["--musique", "x", "--index", str(tmp_path / "i"), "--k", "0"]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert [line.startswith("error: ") for line in errors] == [True] * 3
