"""Keyword retrieval with BM25 (bm25s), behind the same interface as dense retrieval.

In:  the paragraphs. Out: DIR/bm25-N/ (sparse scores, vocabulary) and a `Retriever`. Words are lower-cased, English stop
     words dropped, the rest stemmed (Snowball). A paragraph that shares no word with a query is never a hit, and scores
     0.

BM25 weighs a word by how rare it is in the whole corpus, so an addition indexes everything again.
Source: Lù, BM25S (2024); the variant is Lucene's. Legend: N paragraphs.
"""

from __future__ import annotations

import shutil
import sys
import threading
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from inference.corpus import Added, Paragraph, ParagraphStore
from inference.encoders import Encoder, clean, paragraph_text
from inference.index_manifest import Manifest, write_manifest
from inference.retrieval import Hit, check_k, open_store

_READ = 10_000  # paragraphs read from the store at a time
_SHOW = 50_000  # from so many paragraphs on it takes seconds
_WORD = r"(?u)\b\w+\b"


@dataclass(frozen=True)
class Options:
    """k1: how soon a repeated word stops counting. b: how much long paragraphs are held back."""

    k1: float = 1.5
    b: float = 0.75

    def __post_init__(self) -> None:
        if self.k1 < 0 or not 0 <= self.b <= 1:
            raise ValueError(f"k1 is {self.k1} and b is {self.b}: k1 must not be negative, b is from 0 to 1")

    def record(self) -> dict[str, Any]:
        return asdict(self)


def build(
    directory: Path,
    store: ParagraphStore,
    encoder: Encoder | None,
    options: Options,
    corpus_sha256: str | None,
    show_progress: bool,
) -> None:
    """Index the store's paragraphs, write the manifest. Takes seconds per 100,000 paragraphs, so it is not resumed."""
    folder = _write(directory, store, options, show_progress)
    index = {"folder": folder, "options": asdict(options)}
    write_manifest(directory, Manifest("bm25", len(store), corpus_sha256, store.digest, None, index))


def load(directory: Path, manifest: Manifest, encoder: Encoder | None, mmap: bool) -> Bm25Retriever:
    return Bm25Retriever(directory, manifest, mmap)


class Bm25Retriever:
    """A BM25 index and its paragraphs; `open_index` makes it."""

    def __init__(self, directory: Path, manifest: Manifest, mmap: bool = True):
        self.directory, self.manifest, self._mmap = directory, manifest, mmap
        self._lock = threading.Lock()
        self._store = open_store(directory, manifest)
        try:
            self._index = _read(directory / manifest.index["folder"], len(self._store), mmap)
        except BaseException:
            self._store.close()
            raise

    def __len__(self) -> int:
        return self.manifest.count

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        check_k(k)
        return [self._top(scores_N, k) for scores_N in self._scores(queries)]

    def paragraphs(self, ids: Sequence[str]) -> list[Paragraph]:
        return self._store.get(ids)

    def score(self, query: str, ids: Sequence[str]) -> list[float]:
        rows = self._store.rows(ids)
        return [float(score) for score in self._scores([query])[0][rows]]

    def add(self, paragraphs: Iterable[Paragraph]) -> Added:
        located = [(f"paragraph {n}", paragraph) for n, paragraph in enumerate(paragraphs, 1)]
        with self._lock:
            old, store = self.manifest, self._store
            if store.stored > old.count:  # an earlier addition did not come to its end
                store.truncate(old.count, old.paragraphs_sha256)
            done = store.extend(located)
            if done.added:
                try:
                    folder = _write(self.directory, store, Options(**old.index["options"]), False)
                    index = _read(self.directory / folder, len(store), self._mmap)
                    manifest = replace(
                        old,
                        count=len(store),
                        paragraphs_sha256=store.digest,
                        index=old.index | {"folder": folder},
                    )
                    write_manifest(self.directory, manifest)
                except BaseException:
                    store.truncate(old.count, old.paragraphs_sha256)
                    raise
                self._index, self.manifest = index, manifest
                shutil.rmtree(self.directory / old.index["folder"], ignore_errors=True)
            return done

    def close(self) -> None:
        self._store.close()

    # -- helpers ------------------------------------------------------------------------------------------------

    def _scores(self, queries: Sequence[str]) -> list[np.ndarray]:
        """BM25 of every paragraph, float32 [N], per query."""
        index = self._index
        found = []
        for words in _tokenise(list(queries)) if queries else []:
            known = index.get_tokens_ids(words)
            found.append(index.get_scores_from_ids(known) if known else np.zeros(len(self), np.float32))
        return found

    def _top(self, scores_N: np.ndarray, k: int) -> list[Hit]:
        if k < len(scores_N):
            least = np.partition(scores_N, -k)[-k]
            rows = np.flatnonzero((scores_N >= least) & (scores_N > 0))
        else:
            rows = np.flatnonzero(scores_N > 0)
        rows = rows[np.lexsort((rows, -scores_N[rows]))][:k]
        ids = self._store.ids(rows.tolist())
        return [Hit(one, float(scores_N[row])) for one, row in zip(ids, rows, strict=True)]


def _tokenise(texts: list[str], **options: Any) -> Any:
    """The words of each text, stemmed (or their ids with the vocabulary: return_ids=True)."""
    import bm25s
    import Stemmer

    settings = {
        "stopwords": "en",
        "token_pattern": _WORD,
        "show_progress": False,
        "return_ids": False,
        **options,
    }
    return bm25s.tokenize([clean(text) for text in texts], stemmer=Stemmer.Stemmer("english"), **settings)


def _write(directory: Path, store: ParagraphStore, options: Options, show_progress: bool) -> str:
    """Index all of the store into a new folder that appears whole; returns its name, which holds the count."""
    import bm25s

    texts = [
        paragraph_text(p) for start in range(0, len(store), _READ) for p in store.read(start, start + _READ)
    ]
    show = show_progress and sys.stderr.isatty() and len(texts) > _SHOW
    index = bm25s.BM25(k1=options.k1, b=options.b, method="lucene")
    index.index(_tokenise(texts, return_ids=True, show_progress=show), show_progress=show)
    name = f"bm25-{len(store)}"
    partial = directory / (name + ".partial")
    for left in (partial, directory / name):
        shutil.rmtree(left, ignore_errors=True)
    try:
        index.save(str(partial), show_progress=False)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise OSError(f"{directory / name}: cannot be written ({error})") from None
    partial.rename(directory / name)
    return name


def _read(folder: Path, count: int, mmap: bool) -> Any:
    """The saved index. ValueError where it is damaged or of another size."""
    import bm25s

    try:
        index = bm25s.BM25.load(str(folder), mmap=mmap, load_corpus=False, show_progress=False)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{folder}: damaged ({error}); build the index again") from None
    if index.scores["num_docs"] != count:
        raise ValueError(
            f"{folder}: holds {index.scores['num_docs']} paragraphs, the manifest says {count}; build the index again"
        )
    return index
