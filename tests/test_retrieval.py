"""Indexes on disk: the hits of a brute-force search, resumed builds, whole additions, clear refusals."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from math import log
from pathlib import Path

import numpy as np
import pytest

from inference import bm25, dense
from inference.corpus import Added, Paragraph
from inference.dense import index_type
from inference.index_manifest import read_manifest
from inference.retrieval import Hit, build_index, open_index
from tests.tiny_encoders import WordEncoder, tiny_bert

NAMES = "apple river castle music king treaty laptop whale poem train north stone".split()
PARAGRAPHS = [
    Paragraph(f"{a.title()} {n}", f"About {a} and {b}.", f"s{n}")
    for n, (a, b) in enumerate((a, b) for a in NAMES for b in NAMES if a < b)
]
QUERIES = ["the king of the north", "Which treaty names a whale?", "train"]
KINDS = {
    "flat": ("dense", {"type": "flat", "shard_rows": 20}),
    "hnsw": ("dense", {"type": "hnsw", "shard_rows": 20}),
    "ivf": ("dense", {"type": "ivf", "shard_rows": 20, "lists": 4}),
    "bm25": ("bm25", {}),
}


@pytest.fixture(params=list(KINDS))
def kind(request) -> str:
    return request.param


def build(kind: str, out: Path, corpus=PARAGRAPHS, encoder: WordEncoder | None = None, **options):
    name, settings = KINDS[kind]
    return build_index(corpus, out, encoder or WordEncoder(), name, **{**settings, **options})


def written(path: Path, paragraphs=PARAGRAPHS) -> Path:
    lines = [json.dumps({"id": p.source_id, "title": p.title, "text": p.text}) for p in paragraphs]
    path.write_text("\n".join(lines) + "\n")
    return path


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


# -- searching ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["flat", "hnsw", "ivf"])
@pytest.mark.parametrize("k", [1, 5, 66])
def test_dense_hits_are_those_of_brute_force(tmp_path, kind, k):
    """With few paragraphs HNSW and IVF (all 4 lists probed) look at all of them, so all three are exact."""
    encoder = WordEncoder()
    retriever = build(kind, tmp_path / "i", encoder=encoder)
    scores = encoder.encode_queries(QUERIES) @ encoder.encode_paragraphs(PARAGRAPHS).T
    found = retriever.search(QUERIES, k)
    for row, hits in zip(scores, found, strict=True):
        assert [hit.paragraph_id for hit in hits] == [
            PARAGRAPHS[i].id for i in np.argsort(-row, kind="stable")[:k]
        ]
        assert np.allclose([hit.score for hit in hits], np.sort(row)[::-1][:k], atol=1e-5)


def test_bm25_is_lucenes_formula(tmp_path):
    """Three paragraphs, words with stop words and endings off: [king king norway], [king river], [stone].

    "kings" is in 2 of 3: idf = ln(1 + 1.5/2.5); lengths 3, 2, 1 with mean 2. Score = idf f / (f + k1 (1 - b + b l/2)).
    """
    corpus = [
        Paragraph("", "Kings, the king of Norway"),
        Paragraph("", "king: rivers"),
        Paragraph("", "a stone"),
    ]
    retriever = build("bm25", tmp_path / "i", corpus)
    idf, k1, b = log(1 + 1.5 / 2.5), 1.5, 0.75
    first, second = (idf * f / (f + k1 * (1 - b + b * length / 2)) for f, length in [(2, 3), (1, 2)])
    (hits,) = retriever.search(["the KINGS"], 5)
    assert hits == [
        Hit(corpus[0].id, pytest.approx(first, rel=1e-5)),
        Hit(corpus[1].id, pytest.approx(second, rel=1e-5)),
    ]
    ids = [p.id for p in reversed(corpus)]
    assert retriever.score("the KINGS", ids) == pytest.approx([0.0, second, first], rel=1e-5)
    assert retriever.search(["", "of the", "unheard"], 3) == [[], [], []]


def test_score_is_what_search_says(tmp_path, kind):
    retriever = build(kind, tmp_path / "i")
    for query, hits in zip(QUERIES, retriever.search(QUERIES, 10), strict=True):
        ids = [hit.paragraph_id for hit in hits][::-1]
        assert retriever.score(query, ids) == pytest.approx([hit.score for hit in hits][::-1], abs=1e-5)
    assert retriever.score("x", []) == [] and retriever.search([], 3) == []


def test_paragraphs_come_back_whole_and_unknown_ids_are_named(tmp_path, kind):
    retriever = build(kind, tmp_path / "i")
    chosen = [PARAGRAPHS[i] for i in (5, 0, 5)]
    assert retriever.paragraphs([p.id for p in chosen]) == chosen
    for ask in (retriever.paragraphs, lambda ids: retriever.score("x", ids)):
        with pytest.raises(ValueError, match=r"paragraph 'p_none' is not in"):
            ask(["p_none"])
    with pytest.raises(ValueError, match=r"k is 0"):
        retriever.search(["x"], 0)
    assert len(retriever.search(["king \ud800 👑"], 3)[0]) == 3


def test_threads_share_a_retriever(tmp_path, kind):
    retriever = build(kind, tmp_path / "i")
    alone = [retriever.search([query], 5)[0] for query in NAMES]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda query: retriever.search([query], 5)[0], NAMES * 10)) == alone * 10


def test_reopened_and_memory_mapped_or_not(tmp_path, kind):
    found = build(kind, tmp_path / "i").search(QUERIES, 7)
    for mmap in (True, False):
        retriever = open_index(tmp_path / "i", WordEncoder(), mmap=mmap)
        assert len(retriever) == len(PARAGRAPHS) and retriever.search(QUERIES, 7) == found


def test_types_go_by_size():
    million = 1_000_000
    assert [index_type("auto", n) for n in (1, million, million + 1, 5 * million, 5 * million + 1)] == [
        "flat", "flat", "hnsw", "hnsw", "ivf",
    ]  # fmt: skip
    assert [index_type("auto", n, gpus=1) for n in (million, 2 * million)] == ["flat", "ivf"]
    assert index_type("hnsw", 3) == "hnsw"


@pytest.mark.gpu
def test_an_index_on_gpus_finds_the_same(tmp_path):
    import faiss

    if faiss.get_num_gpus() == 0:
        pytest.skip("this build of faiss has no GPU")
    for kind in ("flat", "ivf"):
        retriever = build(kind, tmp_path / kind)
        assert (
            "Gpu" in type(retriever._searched[0]).__name__
            or "Replicas" in type(retriever._searched[0]).__name__
        )
        encoder = WordEncoder()
        best = (encoder.encode_queries(QUERIES) @ encoder.encode_paragraphs(PARAGRAPHS).T).argmax(1)
        assert [hits[0].paragraph_id for hits in retriever.search(QUERIES, 1)] == [
            PARAGRAPHS[i].id for i in best
        ]


# -- building -------------------------------------------------------------------------------------------------------


def test_the_manifest_says_what_made_it(tmp_path):
    corpus = written(tmp_path / "c.jsonl", [*PARAGRAPHS, PARAGRAPHS[3]])
    retriever = build("flat", tmp_path / "i", corpus)
    manifest, encoder = read_manifest(tmp_path / "i"), WordEncoder().identity
    assert manifest.count == len(retriever) == len(PARAGRAPHS)
    assert manifest.corpus_sha256 == subprocess.run(
        ["sha256sum", corpus], capture_output=True, text=True, check=True
    ).stdout.split()[0]  # fmt: skip
    assert manifest.encoder == {**encoder.record(), "source": ["words"]}
    assert (manifest.kind, manifest.index["type"], manifest.index["shards"]) == (
        "dense",
        "flat",
        [20, 20, 20, 6],
    )
    assert not (tmp_path / "i" / "build.json").exists()


def test_a_build_that_broke_off_goes_on_and_is_the_same_to_the_byte(tmp_path):
    def stop(call: int) -> None:
        if call == 2:
            raise KeyboardInterrupt

    corpus = written(tmp_path / "c.jsonl")
    broken, whole = tmp_path / "broken", tmp_path / "whole"
    with pytest.raises(KeyboardInterrupt):
        build("flat", broken, corpus, WordEncoder(before=stop))
    with pytest.raises(FileNotFoundError, match=r"not finished; run the same build again"):
        open_index(broken, WordEncoder())
    encoder = WordEncoder()
    build("flat", broken, corpus, encoder)
    assert encoder.calls == [20, 6]
    build("flat", whole, corpus)
    assert contents(broken) == contents(whole)


def test_a_killed_process_loses_one_shard(tmp_path):
    corpus = written(tmp_path / "c.jsonl")
    code = (
        "import os, signal, sys\n"
        "from inference.retrieval import build_index\n"
        "from tests.tiny_encoders import WordEncoder\n"
        "kill = lambda call: os.kill(os.getpid(), signal.SIGKILL) if call == 3 else None\n"
        "build_index(sys.argv[1], sys.argv[2], WordEncoder(before=kill), type='flat', shard_rows=20)\n"
    )
    repository = Path(__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", code, corpus, tmp_path / "i"], cwd=repository, timeout=60)
    assert done.returncode == -signal.SIGKILL
    encoder = WordEncoder()
    retriever = build("flat", tmp_path / "i", corpus, encoder)
    assert encoder.calls == [6] and len(retriever) == len(PARAGRAPHS)


def test_paragraphs_without_a_file_are_resumed_too(tmp_path):
    def stop(call: int) -> None:
        if call == 1:
            raise KeyboardInterrupt

    for _ in range(2):  # once to break off, once to see that other paragraphs are refused
        with pytest.raises(KeyboardInterrupt):
            build("flat", tmp_path / "i", encoder=WordEncoder(before=stop))
        with pytest.raises(ValueError, match=r"unfinished build of other paragraphs"):
            build("flat", tmp_path / "i", PARAGRAPHS[1:])
        encoder = WordEncoder()
        build("flat", tmp_path / "i", encoder=encoder)
        assert encoder.calls == [20, 20, 6]
        (tmp_path / "i" / "manifest.json").unlink()
        for file in (tmp_path / "i").rglob("*.*"):
            file.unlink()
        (tmp_path / "i" / "vectors").rmdir()


def test_an_unfinished_build_of_something_else_is_refused(tmp_path):
    def stop(call: int) -> None:
        raise KeyboardInterrupt

    corpus = written(tmp_path / "c.jsonl")
    with pytest.raises(KeyboardInterrupt):
        build("flat", tmp_path / "i", corpus, WordEncoder(before=stop))
    with pytest.raises(FileExistsError, match=r"unfinished build that differs: encoder: .*words-0.*words-1"):
        build("flat", tmp_path / "i", corpus, WordEncoder(seed=1))
    with pytest.raises(FileExistsError, match=r"differs: kind: there dense, now bm25"):
        build("bm25", tmp_path / "i", corpus)
    assert len(build("flat", tmp_path / "i", corpus, WordEncoder(seed=1), overwrite=True)) == len(PARAGRAPHS)


def test_nothing_of_others_is_touched(tmp_path, kind):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match=r"holds something else \(notes.txt\)"):
        build(kind, tmp_path)
    (tmp_path / "manifest.json").write_text("{}")  # a manifest of something else, such as a MuMu directory
    with pytest.raises(FileExistsError, match=r"also holds something else"):
        build(kind, tmp_path, overwrite=True)
    with pytest.raises(FileExistsError, match=r"is a file"):
        build(kind, tmp_path / "notes.txt")
    assert contents(tmp_path) == {"notes.txt": b"mine", "manifest.json": b"{}"}
    build(kind, tmp_path / "i")
    with pytest.raises(FileExistsError, match=r"already holds an index"):
        build(kind, tmp_path / "i")
    assert len(build(kind, tmp_path / "i", PARAGRAPHS[:4], overwrite=True)) == 4


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("", "is empty: an index needs at least one paragraph"),
        ('{"id": "a", "title": "T"}\n', "line 1: field 'text' is missing"),
        (
            '{"id": "a", "title": "T", "text": "x"}\n{"id": "a", "title": "T", "text": "y"}\n',
            "line 2: id 'a' has another",
        ),
    ],
)  # fmt: skip
def test_a_bad_corpus_leaves_nothing_behind(tmp_path, kind, lines, message):
    (tmp_path / "c.jsonl").write_text(lines)
    with pytest.raises(ValueError, match=message):
        build(kind, tmp_path / "i", tmp_path / "c.jsonl")
    assert contents(tmp_path / "i") == {}
    with pytest.raises(FileNotFoundError, match=r"no such file"):
        build(kind, tmp_path / "i", tmp_path / "none.jsonl")


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("faiss", {}, "unknown kind of index 'faiss'; use dense, bm25, milvus"),
        ("dense", {"type": "pq"}, "unknown type of dense index 'pq'"),
        ("dense", {"shards": 3}, "options of an index of kind 'dense'.*shards"),
        ("dense", {"shard_rows": 0}, "must be at least 1"),
        ("bm25", {"b": 2}, "b is from 0 to 1"),
    ],
)
def test_unknown_options_are_refused(tmp_path, name, options, message):
    with pytest.raises(ValueError, match=message):
        build_index(PARAGRAPHS, tmp_path / "i", WordEncoder(), name, **options)
    assert not (tmp_path / "i").exists()


# -- opening --------------------------------------------------------------------------------------------------------


def test_another_encoder_is_refused_with_every_difference(tmp_path):
    build("flat", tmp_path / "i")
    with pytest.raises(
        ValueError, match=r"built with another encoder, words-0 .index. and words-1"
    ) as caught:
        open_index(tmp_path / "i", WordEncoder(dim=8, seed=1))
    assert "dim: index 16, in use 8" in str(caught.value) and "weights_sha256: index '" in str(caught.value)
    assert "pooling" not in str(caught.value) and "build it again" in str(caught.value)


def test_another_corpus_is_refused(tmp_path, kind):
    corpus = written(tmp_path / "c.jsonl")
    build(kind, tmp_path / "i", corpus)
    open_index(tmp_path / "i", WordEncoder(), corpus=corpus)
    other = written(tmp_path / "other.jsonl", PARAGRAPHS[1:])
    with pytest.raises(ValueError, match=r"built from another corpus; sha256: index \w+, .*other.jsonl \w+"):
        open_index(tmp_path / "i", WordEncoder(), corpus=other)


def test_damaged_directories_say_what_is_wrong(tmp_path, kind):
    with pytest.raises(FileNotFoundError, match=r"holds no index"):
        open_index(tmp_path)
    build(kind, tmp_path / "i")
    manifest = tmp_path / "i" / "manifest.json"
    whole = manifest.read_text()
    manifest.write_text(whole.replace("index/1", "index/9"))
    with pytest.raises(ValueError, match=r"schema is 'index/9', this version reads 'index/1'"):
        open_index(tmp_path / "i", WordEncoder())
    manifest.write_text(whole[:50])
    with pytest.raises(ValueError, match=r"no manifest of an index"):
        open_index(tmp_path / "i", WordEncoder())
    manifest.write_text(whole.replace(f'"count": {len(PARAGRAPHS)}', '"count": 99'))
    with pytest.raises(
        ValueError, match=r"paragraphs.sqlite does not belong to this index; paragraphs: index 99, file 66"
    ):
        open_index(tmp_path / "i", WordEncoder())
    manifest.write_text(whole)
    damaged = next((tmp_path / "i").glob("bm25-*/params*" if kind == "bm25" else "index-*.faiss"))
    damaged.write_bytes(b"{}")
    with pytest.raises(ValueError, match=r"damaged|holds None paragraphs"):
        open_index(tmp_path / "i", WordEncoder())
    damaged.unlink()
    with pytest.raises((FileNotFoundError, ValueError), match=r"missing|damaged"):
        open_index(tmp_path / "i", WordEncoder())


def test_a_damaged_shard_is_named(tmp_path):
    build("flat", tmp_path / "i")
    shard = tmp_path / "i" / "vectors" / "00001.npy"
    shard.write_bytes(shard.read_bytes()[:200])
    with pytest.raises(ValueError, match=r"00001\.npy: damaged"):
        open_index(tmp_path / "i", WordEncoder()).score("x", [PARAGRAPHS[25].id])


def test_the_encoder_an_index_names_is_loaded(tmp_path):
    query, context = tiny_bert(tmp_path / "q", 1), tiny_bert(tmp_path / "c", 2)
    from inference.encoders import load_encoder

    retriever = build_index(PARAGRAPHS[:9], tmp_path / "i", load_encoder(query, context, query_prefix="a "))
    assert open_index(tmp_path / "i").search(["king"], 3) == retriever.search(["king"], 3)
    query.rename(tmp_path / "gone")
    with pytest.raises(FileNotFoundError, match=r"its encoder is q \+ c: .*no such encoder directory"):
        open_index(tmp_path / "i")


# -- adding ---------------------------------------------------------------------------------------------------------

MORE = [Paragraph("Zebra", "About a zebra.", "z1"), PARAGRAPHS[0], Paragraph("Yak", "About a yak.")]


def test_what_is_added_is_found_and_what_was_there_is_skipped(tmp_path, kind):
    build(kind, tmp_path / "i").close()
    encoder = WordEncoder()
    retriever = open_index(tmp_path / "i", encoder)
    assert retriever.add([*MORE, MORE[0]]) == Added(2, 2)
    assert retriever.add(MORE) == Added(0, 3) and len(retriever) == 68
    if kind != "bm25":
        assert encoder.calls == [2]
    for again in (retriever, open_index(tmp_path / "i", WordEncoder())):
        hits = again.search(["zebra", "yak", "apple river"], 2)
        assert [found[0].paragraph_id for found in hits[:2]] == [MORE[0].id, MORE[2].id]
        assert again.paragraphs([MORE[2].id]) == [MORE[2]]
        assert again.score("zebra", [hit.paragraph_id for hit in hits[0]]) == pytest.approx(
            [hit.score for hit in hits[0]], abs=1e-5
        )


def test_an_index_with_additions_finds_what_one_of_everything_finds(tmp_path, kind):
    """In parts and in one go, below and (dense: made anew) above the size at which additions join the index."""
    whole = build(kind, tmp_path / "whole", [*PARAGRAPHS, MORE[0], MORE[2]]).search(QUERIES, 9)
    retriever = build(kind, tmp_path / "parts", PARAGRAPHS[:30])
    retriever.add(PARAGRAPHS[30:])
    retriever.add(MORE)
    parts = retriever.search(QUERIES, 9)
    assert [[h.paragraph_id for h in hits] for hits in parts] == [
        [h.paragraph_id for h in hits] for hits in whole
    ]
    assert len(list((tmp_path / "parts").glob("*"))) == len(list((tmp_path / "whole").glob("*")))


def test_many_additions_join_the_index(tmp_path, monkeypatch):
    monkeypatch.setattr(dense, "TAIL_MIN", 3)
    retriever = build("flat", tmp_path / "i", PARAGRAPHS[:40])
    retriever.add(PARAGRAPHS[40:44])
    assert retriever.manifest.index["indexed"] == 40  # 4 are a tenth of 40, no more
    retriever.add(PARAGRAPHS[44:])
    assert retriever.manifest.index["indexed"] == 66
    assert [p.name for p in (tmp_path / "i").glob("index*")] == ["index-66.faiss"]
    again = open_index(tmp_path / "i", WordEncoder())
    assert (
        again.search(QUERIES, 9)
        == retriever.search(QUERIES, 9)
        == build("flat", tmp_path / "w").search(QUERIES, 9)
    )


def test_an_addition_that_fails_changes_nothing(tmp_path, kind, monkeypatch):
    retriever = build(kind, tmp_path / "i")
    found = retriever.search(QUERIES, 5)
    with pytest.raises(ValueError, match=r"paragraph 2: id 's3' has another title or text"):
        retriever.add([MORE[0], Paragraph("Other", "text", "s3")])

    def full(*args: object) -> None:
        raise OSError("No space left on device")

    for module in (dense, bm25):
        monkeypatch.setattr(module, "write_manifest", full)
    with pytest.raises(OSError, match=r"No space"):
        retriever.add(MORE)
    monkeypatch.undo()
    for again in (retriever, open_index(tmp_path / "i", WordEncoder())):
        assert len(again) == len(PARAGRAPHS) and again.search(QUERIES, 5) == found
        with pytest.raises(ValueError, match=r"is not in"):
            again.paragraphs([MORE[0].id])
    assert retriever.add(MORE) == Added(2, 1)
    assert retriever.search(["zebra"], 1)[0][0].paragraph_id == MORE[0].id


def test_an_addition_killed_before_its_manifest_did_not_happen(tmp_path, kind):
    """The manifest is put back as it was, which is what a kill just before it is written leaves."""
    retriever = build(kind, tmp_path / "i")
    found, manifest = retriever.search(QUERIES, 5), (tmp_path / "i" / "manifest.json").read_bytes()
    if kind == "bm25":  # the old index is removed only after the manifest
        old = contents(tmp_path / "i" / f"bm25-{len(PARAGRAPHS)}")
    retriever.add([MORE[0]])
    (tmp_path / "i" / "manifest.json").write_bytes(manifest)
    if kind == "bm25":
        (tmp_path / "i" / f"bm25-{len(PARAGRAPHS)}").mkdir()
        for name, data in old.items():
            (tmp_path / "i" / f"bm25-{len(PARAGRAPHS)}" / name).write_bytes(data)
    again = open_index(tmp_path / "i", WordEncoder())
    assert again.search(QUERIES, 5) == found and len(again) == len(PARAGRAPHS)
    assert again.add([MORE[2]]) == Added(1, 0) and again.add([MORE[0]]) == Added(1, 0)
    assert [hits[0].paragraph_id for hits in again.search(["yak", "zebra"], 1)] == [MORE[2].id, MORE[0].id]
