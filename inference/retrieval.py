"""Fresh retrieval R(q_sub) of CMT-RAG Algorithm 1: the interface, and how an index is built and opened.

In:  a corpus (JSONL), an encoder. Out: an index directory; from it a `Retriever`: resolved sub-questions in, paragraph
     ids with scores out (paper C.1; top 5 in C.5).

A directory holds manifest.json, the paragraphs, and what its kind needs (`dense.py`, `bm25.py`, `milvus.py`). A build
that was killed goes on where it was.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from inference.corpus import Added, Paragraph, ParagraphStore, file_sha256, read_corpus
from inference.encoders import Encoder, load_encoder
from inference.index_manifest import (
    KINDS,
    MANIFEST,
    PLAN,
    STORE,
    Manifest,
    check_corpus,
    check_encoder,
    check_store,
    read_manifest,
    write_json,
)

# What an index directory may hold.
_OWN = (
    f"{MANIFEST}*",
    f"{PLAN}*",
    f"{STORE}*",
    "vectors",
    "index*.faiss*",
    "bm25*",
    "milvus.*",
    ".milvus.*",
)


@dataclass(frozen=True)
class Hit:
    """A paragraph found, with its score (inner product, or BM25)."""

    paragraph_id: str
    score: float


class Retriever(Protocol):
    """What the pipeline asks of a corpus. Safe to share between threads."""

    def __len__(self) -> int: ...

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        """The k best paragraphs of each query, best first (fewer where there are no more). ValueError for k < 1."""
        ...

    def paragraphs(self, ids: Sequence[str]) -> list[Paragraph]:
        """The paragraphs of these ids, in this order. ValueError names an id that is not in the corpus."""
        ...

    def score(self, query: str, ids: Sequence[str]) -> list[float]:
        """The scores `search` would give these paragraphs (recovered ones meet the current sub-question)."""
        ...

    def add(self, paragraphs: Iterable[Paragraph]) -> Added:
        """Make further paragraphs searchable; those that are there already are skipped. All or none."""
        ...

    def close(self) -> None: ...


def build_index(
    corpus: str | Path | Iterable[Paragraph],
    out: str | Path,
    encoder: Encoder | None = None,
    kind: str = "dense",
    overwrite: bool = False,
    show_progress: bool = True,
    **options: Any,
) -> Retriever:
    """Build an index directory and open it; an unfinished one of the same corpus, encoder and options is finished.

    corpus: a file (formats.md) or paragraphs. encoder: default all-MiniLM-L6-v2; not used by BM25.
    options: of the kind: `Options` of dense.py, bm25.py or milvus.py.

    Raises FileNotFoundError or ValueError for a corpus that cannot be read (file, line, field) or is empty, and for
    unknown options; FileExistsError where `out` holds something else; OSError where the disk is full.
    """
    module = _kind(kind)
    try:
        settings = module.Options(**options)
    except TypeError as error:
        raise ValueError(f"options of an index of kind '{kind}': {error}") from None
    out, sha = Path(out), None
    if isinstance(corpus, str | Path):
        sha = file_sha256(corpus)
    if kind != "bm25":
        encoder = encoder or load_encoder()
    plan = {
        "kind": kind,
        "corpus_sha256": sha,
        "encoder": encoder.identity.record() if encoder is not None and kind != "bm25" else None,
        "options": settings.record(),
    }
    _prepare(out, plan, overwrite)
    write_json(out / PLAN, plan)
    try:
        store = _paragraphs(corpus, out, sha)
    except BaseException:
        if not (out / STORE).is_file():  # nothing worth keeping yet
            _remove(out)
        raise
    try:
        module.build(out, store, encoder, settings, sha, show_progress)
    finally:
        store.close()
    (out / PLAN).unlink(missing_ok=True)
    return open_index(out, encoder)


def open_index(
    path: str | Path,
    encoder: Encoder | None = None,
    corpus: str | Path | None = None,
    device: str | None = None,
    mmap: bool = True,
) -> Retriever:
    """The retriever of an index directory, whichever kind it is.

    encoder: None loads the one the manifest names. corpus: the file it must have been built from. mmap: read the
    index from disk as it is needed, where its type can.

    Raises FileNotFoundError or ValueError that name what is missing, or every difference, and what to do.
    """
    path = Path(path)
    manifest = read_manifest(path)
    if corpus is not None:
        check_corpus(path, manifest, Path(corpus), file_sha256(corpus))
    if manifest.encoder is not None:
        encoder = encoder or _stored_encoder(path, manifest, device)
        check_encoder(path, manifest, encoder.identity)
    return _kind(manifest.kind).load(path, manifest, encoder, mmap)


def open_store(directory: Path, manifest: Manifest) -> ParagraphStore:
    """The paragraphs of an index, checked against its manifest; what an unfinished addition left is not seen."""
    store = ParagraphStore(directory / STORE, limit=manifest.count)
    try:
        check_store(directory, manifest, store.stored, store.digest)
    except ValueError:
        store.close()
        raise
    return store


def check_k(k: int) -> None:
    if k < 1:
        raise ValueError(f"k is {k}: ask for at least one paragraph")


# -- helpers --------------------------------------------------------------------------------------------------------


def _kind(kind: str) -> Any:
    """The module of a kind: `Options`, `build`, `load`."""
    if kind not in KINDS:
        raise ValueError(f"unknown kind of index {kind!r}; use {', '.join(KINDS)}")
    return import_module(f"inference.{kind}")


def _stored_encoder(path: Path, manifest: Manifest, device: str | None) -> Encoder:
    record = manifest.encoder or {}
    source = record["source"]
    try:
        return load_encoder(
            *source, device=device, normalise=record["normalise"], max_length=record["max_length"],
            query_prefix=record["query_prefix"], paragraph_prefix=record["paragraph_prefix"],
        )  # fmt: skip
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{path}: its encoder is {record['name']}: {error}") from None


def _prepare(out: Path, plan: dict[str, Any], overwrite: bool) -> None:
    """An empty directory, or one with an unfinished build of the same plan. Nothing that is not ours is touched."""
    if out.exists() and not out.is_dir():
        raise FileExistsError(f"{out} is a file; an index is a directory")
    out.mkdir(parents=True, exist_ok=True)
    names = {entry.name for entry in out.iterdir()}
    if MANIFEST not in names and PLAN not in names:
        if names:
            raise FileExistsError(
                f"{out} holds something else ({sorted(names)[0]}); choose an empty directory"
            )
        return
    if not overwrite:
        if MANIFEST in names:
            raise FileExistsError(
                f"{out} already holds an index; open it, or build with overwrite=True (--overwrite)"
            )
        differences = _differences(out / PLAN, plan)
        if not differences:
            return
        raise FileExistsError(
            f"{out} holds an unfinished build that differs: {'; '.join(differences)}. "
            "Build with overwrite=True (--overwrite) to start afresh"
        )
    if foreign := sorted(name for name in names if not any(fnmatch(name, own) for own in _OWN)):
        raise FileExistsError(f"{out} also holds something else ({foreign[0]}); choose another directory")
    _remove(out)


def _remove(out: Path) -> None:
    """Empty an index directory, the manifest first: without it it is none."""
    (out / MANIFEST).unlink(missing_ok=True)
    if any(out.glob("milvus.*")):
        _kind("milvus").release(out)
    for entry in [entry for own in _OWN for entry in out.glob(own)]:
        shutil.rmtree(entry) if entry.is_dir() else entry.unlink()


def _differences(file: Path, plan: dict[str, Any]) -> list[str]:
    try:
        old = json.loads(file.read_text(encoding="utf-8"))
    except ValueError:
        return [f"{file.name} is damaged"]
    return [
        f"{key}: there {old.get(key)}, now {value}" for key, value in plan.items() if old.get(key) != value
    ]


def _paragraphs(corpus: str | Path | Iterable[Paragraph], out: Path, sha: str | None) -> ParagraphStore:
    """The store of a corpus, made anew unless it is that of the same file already."""
    target, partial = out / STORE, out / (STORE + ".partial")
    if target.is_file() and sha is not None:
        return ParagraphStore(target)
    for left in out.glob(STORE + ".partial*"):
        left.unlink()
    if isinstance(corpus, str | Path):
        located: Iterable[tuple[str, Paragraph]] = read_corpus(corpus)
        what = str(corpus)
    else:
        located = ((f"paragraph {n}", paragraph) for n, paragraph in enumerate(corpus, 1))
        what = "the corpus"
    store = ParagraphStore.create(partial)
    store.extend(located)
    digest, empty = store.digest, len(store) == 0
    store.close()
    if empty:
        raise ValueError(f"{what} is empty: an index needs at least one paragraph")
    if target.is_file():
        old = ParagraphStore(target)
        same = old.digest == digest
        old.close()
        if not same:
            raise ValueError(
                f"{out} holds an unfinished build of other paragraphs; build with overwrite=True to start afresh"
            )
    partial.replace(target)
    return ParagraphStore(target)
