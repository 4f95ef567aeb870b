"""Corpora: ids made of content, duplicates counted, errors that say where, and a store that is all or nothing."""

from __future__ import annotations

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inference import corpus as module
from inference.corpus import Added, Paragraph, ParagraphStore, paragraph_id, read_corpus


def store_of(tmp_path: Path, *paragraphs: Paragraph, name: str = "p.sqlite") -> ParagraphStore:
    store = ParagraphStore.create(tmp_path / name)
    store.extend(("here", p) for p in paragraphs)
    return store


def written(tmp_path: Path, *lines: object) -> Path:
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join((one if isinstance(one, str) else json.dumps(one)) + "\n" for one in lines))
    return path


def test_a_paragraph_id_is_the_documented_hash():
    expected = "p_" + hashlib.sha1(b"Title\x1ftext").hexdigest()[:12]
    assert paragraph_id("Title", "text") == Paragraph("Title", "text", "own").id == expected
    assert paragraph_id("T", "itletext") != paragraph_id("Title", "text")


def test_records_become_paragraphs_that_keep_their_own_id(tmp_path):
    path = written(
        tmp_path, {"id": "a", "title": "", "text": "שלום 🙂\0"}, "", {"id": 7, "title": "T", "text": "x"}
    )
    found = list(read_corpus(path))
    assert found == [
        (f"{path}, line 1", Paragraph("", "שלום 🙂\0", "a")),
        (f"{path}, line 3", Paragraph("T", "x", "7")),
    ]
    store = store_of(tmp_path, *(p for _, p in found))
    assert store.get([p.id for _, p in reversed(found)]) == [p for _, p in reversed(found)]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"id": "a", "title": "T"}, "line 2: field 'text' is missing"),
        ({"id": "a", "text": "x"}, "line 2: field 'title' is missing"),
        ({"title": "T", "text": "x"}, "line 2: field 'id' is missing"),
        ({"id": "a", "title": "T", "text": 3}, "line 2: field 'text' must be str, got int"),
        ({"id": "a", "title": "T", "text": " \n"}, "line 2: field 'text' is empty"),
        ({"id": "a", "title": "T", "text": "\ud800"}, "line 2: a string holds half a surrogate pair"),
        ('{"id": "a",', "line 2: not valid JSON"),
        ("[1]", "line 2: expected a JSON object, got list"),
    ],
)
def test_a_bad_record_is_an_error_with_its_place(tmp_path, line, message):
    path = written(tmp_path, {"id": "ok", "title": "T", "text": "x"}, line)
    with pytest.raises(ValueError, match=message.replace("(", r"\(")) as caught:
        list(read_corpus(path))
    assert str(caught.value).startswith(str(path))


def test_same_title_and_text_is_one_paragraph(tmp_path):
    store = ParagraphStore.create(tmp_path / "p.sqlite")
    done = store.extend(
        [("l1", Paragraph("T", "x", "a")), ("l2", Paragraph("T", "x", "b")), ("l3", Paragraph("T", "y", "c")),
         ("l4", Paragraph("T", "x", "a"))]
    )  # fmt: skip
    assert done == Added(2, 2) and len(store) == 2
    assert [p.source_id for p in store.read(0, 9)] == ["a", "c"]


@pytest.mark.parametrize("first", ["a", "b"])  # "b" is the own id of a duplicate that was left out
def test_one_own_id_with_two_texts_is_an_error_and_nothing_is_added(tmp_path, first):
    store = store_of(tmp_path, Paragraph("T", "x", "a"), Paragraph("T", "x", "b"))
    digest = store.digest
    with pytest.raises(ValueError, match=f"^line 9: id '{first}' has another title or text"):
        store.extend([("line 8", Paragraph("T", "new", "n")), ("line 9", Paragraph("T", "other", first))])
    assert len(store) == 1 and store.digest == digest
    assert store.find(paragraph_id("T", "new")) is None
    with pytest.raises(
        ValueError, match=r"^line 9: id 'c' has another"
    ):  # a known text under an id that is taken
        store.extend([("line 8", Paragraph("T", "new", "c")), ("line 9", Paragraph("T", "x", "c"))])


def test_two_paragraphs_with_one_id_by_accident_are_told_apart(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "paragraph_id", lambda title, text: "p_000000000000")
    store = store_of(tmp_path, Paragraph("One", "x"))
    with pytest.raises(
        ValueError, match=r"line 2: 'Two' and 'One' have the same id p_000000000000 by accident"
    ):
        store.extend([("line 2", Paragraph("Two", "y"))])


def test_a_full_disk_loses_nothing(tmp_path):
    store = store_of(tmp_path, Paragraph("T", "x", "a"))
    pages = store._db.execute("PRAGMA page_count").fetchone()[0]
    store._db.execute(f"PRAGMA max_page_count = {pages + 2}")  # SQLite then says what it says of a full disk
    with pytest.raises(OSError, match=r"cannot be written .*full.*nothing was added"):
        store.extend(("here", Paragraph(f"T{n}", "y" * 5000)) for n in range(50))
    assert len(store) == 1 and store.get([paragraph_id("T", "x")]) == [Paragraph("T", "x", "a")]
    store._db.execute("PRAGMA max_page_count = 100000")
    assert store.extend([("here", Paragraph("U", "y"))]) == Added(1, 0)


def test_two_processes_never_share_a_row(tmp_path):
    mine = store_of(tmp_path, Paragraph("T", "x"))
    theirs = ParagraphStore(mine.path)
    theirs.extend([("here", Paragraph("T", "theirs"))])
    with pytest.raises(ValueError, match=r"another process has added to it"):
        mine.extend([("here", Paragraph("T", "mine"))])
    assert [p.text for p in ParagraphStore(mine.path).read(0, 9)] == ["x", "theirs"]


def test_a_limit_hides_what_an_unfinished_addition_left(tmp_path):
    paragraphs = [Paragraph("T", text, text) for text in "abcd"]
    whole = store_of(tmp_path, *paragraphs)
    two = store_of(tmp_path, *paragraphs[:2], name="two.sqlite")
    store = ParagraphStore(whole.path, limit=2)
    assert (len(store), store.stored) == (2, 4)
    assert store.find(paragraphs[2].id) is None and store.read(0, 9) == paragraphs[:2]
    with pytest.raises(ValueError, match=f"paragraph '{paragraphs[3].id}' is not in"):
        store.get([paragraphs[3].id])
    store.truncate(2, two.digest)
    assert store.extend([("here", Paragraph("T", "other", "c"))]) == Added(1, 0)  # its own id is free again


def test_an_id_that_is_none_is_named(tmp_path):
    store = store_of(tmp_path, Paragraph("T", "x"))
    for one in ("p_nothing", "\ud800", ""):
        with pytest.raises(ValueError, match=r"is not in"):
            store.rows([one])


def test_other_files_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"p\.sqlite: missing"):
        ParagraphStore(tmp_path / "p.sqlite")
    (tmp_path / "p.sqlite").write_text("not a database, but long enough to be looked at " * 40)
    with pytest.raises(ValueError, match=r"holds no paragraphs"):
        ParagraphStore(tmp_path / "p.sqlite")
    with pytest.raises(FileNotFoundError, match=r"no such file"):
        list(read_corpus(tmp_path / "none.jsonl"))


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.builds(Paragraph, texts, texts), max_size=8), max_size=4))
def test_the_store_is_a_list_of_distinct_paragraphs_however_they_come(tmp_path_factory, batches):
    """Rows are places in the list, ids find them, and the digest does not depend on how they were batched."""
    folder = tmp_path_factory.mktemp("store")
    flat = [paragraph for batch in batches for paragraph in batch]
    distinct = list(dict.fromkeys(flat))
    store = ParagraphStore.create(folder / "a.sqlite")
    done = [store.extend(("here", p) for p in batch) for batch in batches]
    assert sum(d.added for d in done) == len(distinct) == len(store)
    assert sum(d.duplicates for d in done) == len(flat) - len(distinct)
    assert store.read(0, len(flat)) == distinct == store.get([p.id for p in distinct])
    assert store.rows([p.id for p in distinct]) == list(range(len(distinct)))
    assert store.ids(range(len(distinct))) == [p.id for p in distinct]
    assert (
        store.digest == store_of(folder, *flat, name="b.sqlite").digest == ParagraphStore(store.path).digest
    )


def test_threads_share_a_store(tmp_path):
    paragraphs = [Paragraph(f"T{n}", f"x{n}") for n in range(200)]
    store = store_of(tmp_path, *paragraphs)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda p: store.get([p.id])[0], paragraphs * 5))
    assert found == paragraphs * 5
