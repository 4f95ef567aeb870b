"""The Milvus retriever on Milvus Lite: the hits of a brute-force search, resumed builds, additions, clear refusals."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("milvus_lite", reason="milvus-lite is not installed: pip install 'trace-memory[milvus]'")
pytest.importorskip("pymilvus")

from inference import milvus
from inference.corpus import Added, Paragraph
from inference.index_manifest import read_manifest
from inference.retrieval import build_index, open_index
from tests.test_retrieval import MORE, PARAGRAPHS, QUERIES, written
from tests.tiny_encoders import WordEncoder


def build(out, corpus=PARAGRAPHS, encoder=None, **options):
    return build_index(corpus, out, encoder or WordEncoder(), "milvus", **{"batch": 20, **options})


@pytest.fixture
def retriever(tmp_path):
    made = build(tmp_path / "i")
    yield made
    made.close()


def test_hits_scores_and_paragraphs(tmp_path, retriever):
    encoder = WordEncoder()
    scores = encoder.encode_queries(QUERIES) @ encoder.encode_paragraphs(PARAGRAPHS).T
    found = retriever.search(QUERIES, 5)
    for query, row, hits in zip(QUERIES, scores, found, strict=True):
        ids = [hit.paragraph_id for hit in hits]
        assert ids == [PARAGRAPHS[i].id for i in np.argsort(-row)[:5]]
        assert [hit.score for hit in hits] == pytest.approx(np.sort(row)[::-1][:5], abs=1e-5)
        assert retriever.score(query, ids[::-1]) == pytest.approx([hit.score for hit in hits][::-1], abs=1e-5)
    assert len(retriever.search(["king"], 200)[0]) == len(retriever) == len(PARAGRAPHS)
    chosen = [PARAGRAPHS[i] for i in (5, 0, 5)]
    assert retriever.paragraphs([p.id for p in chosen]) == chosen
    assert retriever.search([], 3) == [] and retriever.score("x", []) == []
    for ask in (retriever.paragraphs, lambda ids: retriever.score("x", ids)):
        with pytest.raises(ValueError, match=r"paragraph 'p_none' is not in collection"):
            ask(["p_none"])
    with pytest.raises(ValueError, match=r"k is 0"):
        retriever.search(["x"], 0)
    with pytest.raises(ValueError, match=r"Milvus returns at most"):
        retriever.search(["x"], 20_000)


def test_additions_are_found_and_kept(tmp_path, retriever):
    odd = Paragraph('A "quoted" title', "A yak's שלום 🙂 \\ text", 'its "own" \\ id ü')
    assert retriever.add([*MORE, odd, odd]) == Added(3, 2)
    assert retriever.add([odd]) == Added(0, 1)
    with pytest.raises(ValueError, match=r"paragraph 2: id .* has another title or text"):
        retriever.add([Paragraph("New", "text"), Paragraph("Other", "text", odd.source_id)])
    retriever.close()
    again = open_index(tmp_path / "i", WordEncoder())
    assert len(again) == len(PARAGRAPHS) + 3
    assert again.paragraphs([odd.id, MORE[2].id]) == [odd, MORE[2]]
    assert again.search(["zebra"], 1)[0][0].paragraph_id == MORE[0].id
    again.close()


def test_a_build_that_broke_off_goes_on(tmp_path):
    def stop(call: int) -> None:
        if call == 2:
            raise KeyboardInterrupt

    corpus = written(tmp_path / "c.jsonl")
    with pytest.raises(KeyboardInterrupt):
        build(tmp_path / "i", corpus, WordEncoder(before=stop))
    encoder = WordEncoder()
    retriever = build(tmp_path / "i", corpus, encoder)
    assert encoder.calls == [20, 6] and len(retriever) == len(PARAGRAPHS)
    retriever.close()
    assert not (tmp_path / "i" / "paragraphs.sqlite").exists()
    manifest = read_manifest(tmp_path / "i")
    assert (manifest.kind, manifest.index["collection"], manifest.index["uri"]) == (
        "milvus",
        "trace_memory",
        None,
    )


def test_a_build_that_broke_off_can_be_replaced(tmp_path):
    def stop(call: int) -> None:
        if call == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build(tmp_path / "i", encoder=WordEncoder(before=stop))
    retriever = build(tmp_path / "i", PARAGRAPHS[:9], overwrite=True)
    assert len(retriever) == 9
    retriever.close()


def test_what_does_not_fit_is_refused(tmp_path, retriever):
    retriever.close()
    with pytest.raises(ValueError, match=r"built with another encoder"):
        open_index(tmp_path / "i", WordEncoder(seed=1))
    with pytest.raises(
        ValueError, match=r"its text has 70000 bytes, Milvus holds 65535; split the paragraph"
    ):
        build(tmp_path / "long", [Paragraph("Long", "x" * 70_000)])
    again = open_index(tmp_path / "i", WordEncoder())
    with pytest.raises(ValueError, match=r"its text has 70000 bytes"):
        again.add([Paragraph("New", "text"), Paragraph("Long", "x" * 70_000)])
    assert len(again) == len(PARAGRAPHS)
    again._client.drop_collection("trace_memory")
    again.close()
    with pytest.raises(ValueError, match=r"has no collection 'trace_memory'; build the index again"):
        open_index(tmp_path / "i", WordEncoder())


def test_a_collection_of_something_else_is_left_alone(tmp_path):
    server = str(
        tmp_path / "server.db"
    )  # a file by its URI stands for a server: both go through the same client
    first = build(tmp_path / "a", PARAGRAPHS[:9], uri=server)
    with pytest.raises(
        ValueError, match=r"collection 'trace_memory' at .* holds something else; name another"
    ):
        build(tmp_path / "b", PARAGRAPHS[9:], uri=server)
    second = build(tmp_path / "c", PARAGRAPHS[9:20], uri=server, collection="other")
    assert (len(first), len(second)) == (9, 11)
    first.close()
    second.close()


def test_a_server_that_is_not_there_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(milvus, "CONNECT_SECONDS", 0.5)
    with pytest.raises(OSError, match=r"Milvus at http://127.0.0.1:1: .*connect") as caught:
        build(tmp_path / "i", uri="http://127.0.0.1:1")
    assert "\n" not in str(caught.value)


def test_without_the_packages_the_command_is_named(tmp_path, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "milvus_lite", None)
    with pytest.raises(FileNotFoundError, match=r"milvus_lite is not installed: pip install .*milvus"):
        build(tmp_path / "i")
