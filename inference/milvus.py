"""Dense retrieval in Milvus, for a corpus beyond one machine: the same client for a file and for a cluster.

In:  an encoder, the paragraphs, and where Milvus is: nothing (a Milvus Lite file, DIR/milvus.db) or a server's URL (its
     token comes from MILVUS_TOKEN). Out: a collection that holds vectors, titles and texts, and a `Retriever`.

DIR/ keeps only the manifest (and the Lite file): any machine that has a copy of it searches the same collection. The
collection counts, not the manifest, because several machines may add to it; an addition that breaks off in the
middle has added its first batches, and repeating it adds the rest.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from inference.corpus import Added, Paragraph, ParagraphStore
from inference.encoders import Encoder, QueryCache
from inference.index_manifest import STORE, Manifest, write_manifest
from inference.progress import progress
from inference.retrieval import Hit, check_k

FILE, BEGUN = "milvus.db", "milvus.begun"  # the latter while a build is under way: what the collection is for
MAX_BYTES, MAX_SOURCE_BYTES, MAX_K = 65_535, 1_024, 16_384  # Milvus's own limits
INSTALL = "pip install -c constraints.txt 'trace-memory[milvus]'"
_FIELDS = ["id", "title", "text", "source_id"]
CONNECT_SECONDS = 10
_QUERIES = 256  # per request


@dataclass(frozen=True)
class Options:
    """uri: a server (http://host:19530), or None for a file in the directory. type: Milvus's index type, None for exact
    search in a file and the server's own choice. batch: paragraphs encoded and sent at a time.
    """

    uri: str | None = None
    collection: str = "trace_memory"
    type: str | None = None
    batch: int = 512

    def __post_init__(self) -> None:
        if self.batch < 1:
            raise ValueError(f"batch is {self.batch}: send at least one paragraph at a time")

    def record(self) -> dict[str, Any]:
        return asdict(self)


def build(
    directory: Path,
    store: ParagraphStore,
    encoder: Encoder,
    options: Options,
    corpus_sha256: str | None,
    show_progress: bool,
) -> None:
    """Send every paragraph to a new collection, or the rest of them to the one an unfinished build began.

    Raises ValueError where the collection is another's, OSError for what the server does.
    """
    name, identity = options.collection, encoder.identity
    mark = f"trace-memory index {store.digest[:16]} {identity.weights_sha256[:16]}"
    client = _connect(directory, options.uri)
    try:
        with _failures(options.uri):
            begun = directory / BEGUN  # Milvus Lite forgets a collection's description when it is closed
            if not client.has_collection(name):
                begun.write_text(mark, encoding="utf-8")
                _create(client, options, mark, identity.dim)
            elif not begun.is_file() or begun.read_text(encoding="utf-8") != mark:
                raise ValueError(
                    f"collection '{name}' at {options.uri or FILE} holds something else; name another collection "
                    "or drop that one (nothing on a server is dropped from here)"
                )
            client.load_collection(name)
            done, total = _count(client, name), len(store)
            with progress(f"index {total} paragraphs", total, show_progress) as advance:
                advance(min(done, total))
                for start in range(done, total, options.batch):
                    paragraphs = store.read(start, start + options.batch)
                    _send(client, name, paragraphs, encoder.encode_paragraphs(paragraphs))
                    advance(len(paragraphs))
    finally:
        client.close()
    manifest = Manifest(
        kind="milvus",
        count=len(store),
        corpus_sha256=corpus_sha256,
        paragraphs_sha256=store.digest,
        encoder=identity.record() | {"source": encoder.source},
        index=asdict(options),
    )
    write_manifest(directory, manifest)
    begun.unlink(missing_ok=True)
    store.close()
    (directory / STORE).unlink()  # the collection has it all


def load(directory: Path, manifest: Manifest, encoder: Encoder, mmap: bool) -> MilvusRetriever:
    return MilvusRetriever(directory, manifest, encoder)


def release(directory: Path) -> None:
    """End the Milvus Lite server of a directory that is about to go: it outlives its clients, in this process."""
    if (manager := sys.modules.get("milvus_lite.server_manager")) is not None:
        manager.server_manager_instance.release_server(str(directory / FILE))


class MilvusRetriever:
    """A Milvus collection; `open_index` makes it. Its calls raise OSError where the server fails."""

    def __init__(self, directory: Path, manifest: Manifest, encoder: Encoder):
        self.directory, self.manifest, self.encoder = directory, manifest, encoder
        self.options = Options(**manifest.index)
        self._name, self._lock, self._queries = self.options.collection, threading.Lock(), QueryCache(encoder)
        uri = self.options.uri
        if uri is None and not (directory / FILE).exists():
            raise FileNotFoundError(f"{directory / FILE}: missing; build the index again")
        self._client = _connect(directory, uri)
        try:
            with _failures(uri):
                if not self._client.has_collection(self._name):
                    raise ValueError(f"{uri or FILE} has no collection '{self._name}'; build the index again")
                self._client.load_collection(self._name)
            if len(self) < manifest.count:
                raise ValueError(
                    f"collection '{self._name}' at {uri or FILE} holds {len(self)} paragraphs, the manifest of "
                    f"{directory} says {manifest.count}; build the index again"
                )
        except BaseException:
            self._client.close()
            raise

    def __len__(self) -> int:
        with _failures(self.options.uri):
            return _count(self._client, self._name)

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        check_k(k)
        if k > MAX_K:
            raise ValueError(f"k is {k}: Milvus returns at most {MAX_K}")
        vectors_ND = self._queries.encode(queries)
        found: list[list[Hit]] = []
        with _failures(self.options.uri):
            for start in range(0, len(queries), _QUERIES):
                answers = self._client.search(
                    self._name, data=list(vectors_ND[start : start + _QUERIES]), limit=k,
                    search_params={"metric_type": "IP"}, output_fields=["id"],
                )  # fmt: skip
                found += [[Hit(hit["id"], float(hit["distance"])) for hit in hits] for hits in answers]
        return found

    def paragraphs(self, ids: Sequence[str]) -> list[Paragraph]:
        rows = self._get(ids, _FIELDS)
        return [Paragraph(row["title"], row["text"], row["source_id"]) for row in rows]

    def score(self, query: str, ids: Sequence[str]) -> list[float]:
        query_D = self._queries.encode([query])[0]
        return [float(np.float32(row["vector"]) @ query_D) for row in self._get(ids, ["id", "vector"])]

    def add(self, paragraphs: Iterable[Paragraph]) -> Added:
        given = list(paragraphs)
        with self._lock:
            distinct = {paragraph.id: paragraph for paragraph in reversed(given)}
            for paragraph in distinct.values():
                _check_size(paragraph)
            present = {row["id"] for row in self._find(list(distinct), ["id"])}
            self._check_sources(given)
            new = [distinct[one] for one in dict.fromkeys(p.id for p in given) if one not in present]
            for start in range(0, len(new), self.options.batch):
                batch = new[start : start + self.options.batch]
                vectors_ND = self.encoder.encode_paragraphs(batch)
                with _failures(self.options.uri):
                    _send(self._client, self._name, batch, vectors_ND)
            return Added(len(new), len(given) - len(new))

    def close(self) -> None:
        self._client.close()

    # -- helpers ------------------------------------------------------------------------------------------------

    def _find(self, ids: Sequence[str], fields: list[str]) -> list[dict[str, Any]]:
        """The rows of those ids that are there."""
        found: list[dict[str, Any]] = []
        with _failures(self.options.uri):
            for start in range(0, len(ids), self.options.batch):
                part = [one for one in ids[start : start + self.options.batch] if one.isascii()]
                found += self._client.get(self._name, ids=part, output_fields=fields) if part else []
        return found

    def _get(self, ids: Sequence[str], fields: list[str]) -> list[dict[str, Any]]:
        rows = {row["id"]: row for row in self._find(list(dict.fromkeys(ids)), fields)}
        for one in ids:
            if one not in rows:
                raise ValueError(f"paragraph {one!a} is not in collection '{self._name}'")
        return [rows[one] for one in ids]

    def _check_sources(self, paragraphs: Sequence[Paragraph]) -> None:
        """ValueError where a source id means another paragraph, here or in the collection."""
        known: dict[str, str] = {}
        sources = sorted({p.source_id for p in paragraphs if p.source_id is not None})
        with _failures(self.options.uri):
            for start in range(0, len(sources), self.options.batch):
                part = json.dumps(sources[start : start + self.options.batch], ensure_ascii=False)
                fields = ["id", "source_id"]
                rows = self._client.query(self._name, filter=f"source_id in {part}", output_fields=fields)
                known |= {row["source_id"]: row["id"] for row in rows}
        for n, paragraph in enumerate(paragraphs, 1):
            if (
                paragraph.source_id is not None
                and known.setdefault(paragraph.source_id, paragraph.id) != paragraph.id
            ):
                raise ValueError(
                    f"paragraph {n}: id '{paragraph.source_id}' has another title or text than before; "
                    "ids must be unique"
                )


def _connect(directory: Path, uri: str | None) -> Any:
    try:
        from pymilvus import MilvusClient

        if uri is None:
            import milvus_lite  # noqa: F401  pymilvus's own message names another package
    except ModuleNotFoundError as error:
        raise FileNotFoundError(f"{error.name} is not installed: {INSTALL}") from None
    logging.getLogger("pymilvus").setLevel(logging.CRITICAL)  # it logs every error it raises, with its stack
    with _failures(uri):
        if uri is None:
            return MilvusClient(uri=str(directory / FILE))
        return MilvusClient(uri=uri, token=os.environ.get("MILVUS_TOKEN", ""), timeout=CONNECT_SECONDS)


def _create(client: Any, options: Options, mark: str, dim: int) -> None:
    from pymilvus import DataType

    schema = client.create_schema(auto_id=False, enable_dynamic_field=False, description=mark)
    schema.add_field("id", DataType.VARCHAR, is_primary=True, max_length=14)
    schema.add_field("vector", DataType.FLOAT_VECTOR, dim=dim)
    schema.add_field("title", DataType.VARCHAR, max_length=MAX_BYTES)
    schema.add_field("text", DataType.VARCHAR, max_length=MAX_BYTES)
    schema.add_field("source_id", DataType.VARCHAR, max_length=MAX_SOURCE_BYTES, nullable=True)
    index = client.prepare_index_params()
    type_ = options.type or ("FLAT" if options.uri is None else "AUTOINDEX")
    index.add_index("vector", index_type=type_, metric_type="IP")
    client.create_collection(
        options.collection, schema=schema, index_params=index, consistency_level="Strong"
    )


def _send(client: Any, name: str, paragraphs: Sequence[Paragraph], vectors_ND: np.ndarray) -> None:
    rows = []
    for paragraph, vector_D in zip(paragraphs, vectors_ND, strict=True):
        _check_size(paragraph)
        rows.append(
            {"id": paragraph.id, "vector": vector_D, "title": paragraph.title, "text": paragraph.text,
             "source_id": paragraph.source_id}
        )  # fmt: skip
    client.upsert(name, rows)


def _check_size(paragraph: Paragraph) -> None:
    limits = {"title": MAX_BYTES, "text": MAX_BYTES, "source_id": MAX_SOURCE_BYTES}
    for key, limit in limits.items():
        try:
            size = len((getattr(paragraph, key) or "").encode())
        except UnicodeEncodeError:
            raise ValueError(
                f"'{paragraph.title[:40]!a}': its {key} holds half a surrogate pair; write the whole character"
            ) from None
        if size > limit:
            raise ValueError(
                f"'{paragraph.title[:40]}': its {key} has {size} bytes, Milvus holds {limit}; split the paragraph"
            )


def _count(client: Any, name: str) -> int:
    return int(client.query(name, filter="", output_fields=["count(*)"])[0]["count(*)"])


@contextmanager
def _failures(uri: str | None) -> Iterator[None]:
    """What Milvus raises, as an OSError that says where."""
    try:
        yield
    except Exception as error:
        if not type(error).__module__.startswith(("pymilvus", "grpc", "milvus_lite")):
            raise
        reason = str(getattr(error, "message", error)).strip().splitlines()[0][:300]
        raise OSError(f"Milvus at {uri or FILE}: {reason}") from None
