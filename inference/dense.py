"""Dense retrieval with FAISS: exact by default, an approximate index for corpora too large for that.

In:  an encoder, the paragraphs. Out: DIR/vectors/ (`vectors.py`), DIR/index-N.faiss, and a `Retriever` (paper C.1:
     DRAGON and FAISS). The vectors are kept beside the index: they score given paragraphs and make a larger index.

The type goes by size (`auto`): flat (exact) up to FLAT_MAX paragraphs, an HNSW graph up to HNSW_MAX, then inverted
lists (IVF). What is added later is searched exactly beside the index file, until it is a tenth of it: then the index
is made anew from all vectors. Legend: Q queries, N rows, D dimension, K hits.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np

from inference.corpus import Added, Paragraph, ParagraphStore
from inference.encoders import Encoder, QueryCache
from inference.index_manifest import Manifest, write_manifest
from inference.retrieval import Hit, check_k, open_store
from inference.vectors import FOLDER, VectorShards, encode_shards, write_shard

FLAT_MAX, HNSW_MAX = 1_000_000, 5_000_000  # paragraphs; on a GPU there is no HNSW, IVF takes its place
TAIL_MIN = 4096  # additions stay beside the index at least up to here
INSTALL = "pip install -c constraints.txt faiss-cpu (or a GPU build of faiss)"


@dataclass(frozen=True)
class Options:
    """How to build.

    Attributes:
        type: auto, flat, hnsw or ivf.
        shard_rows: paragraphs encoded between two points at which a killed build goes on.
        links: HNSW, neighbours of a node. ef_construction, ef_search: its breadth when building and searching.
        lists: IVF, number of lists (0: 4 sqrt(N), fewer below 25,000 paragraphs). probes: lists searched per query.
    """

    type: str = "auto"
    shard_rows: int = 2048
    links: int = 32
    ef_construction: int = 200
    ef_search: int = 128
    lists: int = 0
    probes: int = 64

    def __post_init__(self) -> None:
        if self.type not in ("auto", "flat", "hnsw", "ivf"):
            raise ValueError(f"unknown type of dense index {self.type!r}; use auto, flat, hnsw or ivf")
        if min(self.shard_rows, self.links, self.ef_construction, self.ef_search, self.probes) < 1:
            raise ValueError("shard_rows, links, ef_construction, ef_search and probes must be at least 1")

    def record(self) -> dict[str, Any]:
        return asdict(self)


def index_type(type_: str, n: int, gpus: int = 0) -> str:
    """flat, hnsw or ivf for n paragraphs."""
    if type_ != "auto":
        return type_
    if n <= FLAT_MAX:
        return "flat"
    return "hnsw" if n <= HNSW_MAX and gpus == 0 else "ivf"


def build(
    directory: Path,
    store: ParagraphStore,
    encoder: Encoder,
    options: Options,
    corpus_sha256: str | None,
    show_progress: bool,
) -> None:
    """Encode, index, write the manifest. What is finished already is kept."""
    faiss = _faiss()
    rows = encode_shards(directory, store, encoder, options.shard_rows, show_progress)
    shards = VectorShards(directory, rows, encoder.identity.dim)
    type_ = index_type(options.type, len(store), faiss.get_num_gpus())
    file = _write_index(directory, _build_index(shards, type_, options), len(shards))
    manifest = Manifest(
        kind="dense",
        count=len(store),
        corpus_sha256=corpus_sha256,
        paragraphs_sha256=store.digest,
        encoder=encoder.identity.record() | {"source": encoder.source},
        index={
            "type": type_,
            "file": file,
            "indexed": len(shards),
            "shards": rows,
            "options": asdict(options),
        },
    )
    write_manifest(directory, manifest)


def load(directory: Path, manifest: Manifest, encoder: Encoder, mmap: bool) -> DenseRetriever:
    return DenseRetriever(directory, manifest, encoder, mmap)


class DenseRetriever:
    """A FAISS index and its paragraphs; `open_index` makes it."""

    def __init__(self, directory: Path, manifest: Manifest, encoder: Encoder, mmap: bool = True):
        self.directory, self.encoder = directory, encoder
        self._mmap, self._lock, self._queries = mmap, threading.Lock(), QueryCache(encoder)
        self._store = open_store(directory, manifest)
        try:
            self._open(manifest)
        except BaseException:
            self._store.close()
            raise

    def __len__(self) -> int:
        return self.manifest.count

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        check_k(k)
        if not queries:
            return []
        queries_QD = self._queries.encode(queries)
        index, tail, first = self._searched
        scores_QK, rows_QK = index.search(queries_QD, min(k, index.ntotal))
        if tail.ntotal:
            more_QK, rows = tail.search(queries_QD, min(k, tail.ntotal))
            scores_QK = np.concatenate([scores_QK, more_QK], axis=1)
            rows_QK = np.concatenate([rows_QK, np.where(rows < 0, rows, rows + first)], axis=1)
        return [self._hits(*found, k) for found in zip(scores_QK, rows_QK, strict=True)]

    def paragraphs(self, ids: Sequence[str]) -> list[Paragraph]:
        return self._store.get(ids)

    def score(self, query: str, ids: Sequence[str]) -> list[float]:
        vectors_ND = self._shards.take(self._store.rows(ids))
        return [float(score) for score in vectors_ND @ self._queries.encode([query])[0]]

    def add(self, paragraphs: Iterable[Paragraph]) -> Added:
        """As `Retriever.add`. Costs the encoding, and a new index when the additions exceed a tenth of the old one."""
        located = [(f"paragraph {n}", paragraph) for n, paragraph in enumerate(paragraphs, 1)]
        with self._lock:
            manifest, store = self.manifest, self._store
            new = store.missing(paragraph for _, paragraph in located)
            if store.stored > manifest.count:  # an earlier addition did not come to its end
                store.truncate(manifest.count, manifest.paragraphs_sha256)
            rows = list(manifest.index["shards"])
            shard = self.directory / FOLDER / f"{len(rows):05d}.npy"
            if new:
                write_shard(shard, self.encoder.encode_paragraphs(new))
            try:
                done = store.extend(located)
                if new:
                    index = manifest.index | {"shards": [*rows, len(new)]}
                    self._commit(
                        replace(manifest, count=len(store), paragraphs_sha256=store.digest, index=index)
                    )
            except BaseException:
                if store.stored > manifest.count:
                    store.truncate(manifest.count, manifest.paragraphs_sha256)
                if new:
                    shard.unlink(missing_ok=True)
                raise
            return done

    def close(self) -> None:
        self._store.close()

    # -- helpers ------------------------------------------------------------------------------------------------

    def _commit(self, manifest: Manifest) -> None:
        """Fold a long tail into the index, write the manifest (from here on the addition counts), open what it says."""
        old = manifest.index["file"]
        if manifest.count - manifest.index["indexed"] > max(TAIL_MIN, manifest.index["indexed"] // 10):
            options = Options(**manifest.index["options"])
            shards = VectorShards(self.directory, manifest.index["shards"], self.encoder.identity.dim)
            type_ = index_type(options.type, manifest.count, _faiss().get_num_gpus())
            file = _write_index(self.directory, _build_index(shards, type_, options), len(shards))
            index = manifest.index | {"type": type_, "file": file, "indexed": len(shards)}
            manifest = replace(manifest, index=index)
        write_manifest(self.directory, manifest)
        self._open(manifest)
        if manifest.index["file"] != old:
            (self.directory / old).unlink(missing_ok=True)

    def _open(self, manifest: Manifest) -> None:
        faiss, settings = _faiss(), manifest.index
        index = _read_index(self.directory / settings["file"], settings["type"], self._mmap)
        dim = self.encoder.identity.dim
        if (index.ntotal, index.d) != (settings["indexed"], dim):
            raise ValueError(
                f"{self.directory / settings['file']}: holds {index.ntotal} vectors of {index.d} dimensions, the "
                f"manifest says {settings['indexed']} of {dim}; build the index again"
            )
        if settings["type"] == "hnsw":
            index.hnsw.efSearch = settings["options"]["ef_search"]
        if settings["type"] == "ivf":
            index.nprobe = min(settings["options"]["probes"], index.nlist)
        shards = VectorShards(self.directory, settings["shards"], dim)
        tail = faiss.IndexFlatIP(dim)
        for block_ND in shards.blocks(settings["indexed"]) if len(shards) > settings["indexed"] else ():
            tail.add(np.ascontiguousarray(block_ND))
        self._shards, self.manifest = shards, manifest
        self._searched = (_to_gpu(index, settings["type"]), tail, settings["indexed"])

    def _hits(self, scores: np.ndarray, rows: np.ndarray, k: int) -> list[Hit]:
        order = [i for i in np.lexsort((rows, -scores)) if rows[i] >= 0][:k]
        ids = self._store.ids([int(rows[i]) for i in order])
        return [Hit(one, float(scores[i])) for one, i in zip(ids, order, strict=True)]


def _build_index(shards: VectorShards, type_: str, options: Options) -> Any:
    faiss, dim = _faiss(), shards.dim
    if type_ == "flat":
        index = faiss.IndexFlatIP(dim)
    elif type_ == "hnsw":
        index = faiss.IndexHNSWFlat(dim, options.links, faiss.METRIC_INNER_PRODUCT)
        index.hnsw.efConstruction = options.ef_construction
    else:
        # k-means wants 39 vectors for each list
        lists = min(options.lists, len(shards)) or max(
            1, min(round(4 * sqrt(len(shards))), len(shards) // 39)
        )
        index = faiss.IndexIVFFlat(faiss.IndexFlatIP(dim), dim, lists, faiss.METRIC_INNER_PRODUCT)
        wanted = min(len(shards), 256 * lists)  # what k-means looks at, at most
        rows = np.sort(np.random.default_rng(0).choice(len(shards), wanted, replace=False))
        index.train(shards.take(rows.tolist()))
    for block_ND in shards.blocks():
        index.add(np.ascontiguousarray(block_ND))
    return index


def _write_index(directory: Path, index: Any, count: int) -> str:
    """Write an index file in one step; its name holds the count, so that a new one never replaces the one in use."""
    name = f"index-{count}.faiss"
    partial = directory / (name + ".partial")
    try:
        _faiss().write_index(index, str(partial))
    except RuntimeError as error:
        partial.unlink(missing_ok=True)
        raise OSError(f"{directory / name}: cannot be written ({_first_line(error)})") from None
    partial.replace(directory / name)
    return name


def _read_index(file: Path, type_: str, mmap: bool) -> Any:
    """The index of a file; memory-mapped (flat and HNSW vectors, lists of IVF) where that is asked for."""
    faiss = _faiss()
    if not file.is_file():
        raise FileNotFoundError(f"{file}: missing; build the index again")
    flags = 0
    if mmap:
        flags = faiss.IO_FLAG_MMAP if type_ == "ivf" else getattr(faiss, "IO_FLAG_MMAP_IFC", 0)
    try:
        return faiss.read_index(str(file), flags)
    except RuntimeError as error:
        raise ValueError(f"{file}: damaged ({_first_line(error)}); build the index again") from None


def _to_gpu(index: Any, type_: str) -> Any:
    """The index on all GPUs where this build of faiss has any and the type can; else as it is."""
    faiss = _faiss()
    if faiss.get_num_gpus() == 0 or type_ == "hnsw":
        return index
    return faiss.index_cpu_to_all_gpus(index)


def _faiss() -> Any:
    try:
        import faiss
    except ModuleNotFoundError:
        raise FileNotFoundError(f"faiss is not installed: {INSTALL}") from None
    return faiss


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0][:200]
