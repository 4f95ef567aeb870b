"""What an index directory says about itself, and whether it fits what it is opened with.

In / out: DIR/manifest.json. It is written last and replaced in one step, so a directory with one is whole; an addition
counts from the moment its manifest is there.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from inference.encoders import EncoderIdentity

SCHEMA = "index/1"
KINDS = ("dense", "bm25", "milvus")
MANIFEST, PLAN, STORE = "manifest.json", "build.json", "paragraphs.sqlite"


@dataclass(frozen=True)
class Manifest:
    """manifest.json.

    Attributes:
        kind: dense (FAISS), bm25 or milvus.
        count: paragraphs searched.
        corpus_sha256: of the corpus file it was built from; None for paragraphs that came without a file.
        paragraphs_sha256: of all paragraph ids in order, additions included.
        encoder: `EncoderIdentity`, and `source`: what `load_encoder` takes; None for BM25.
        index: what the kind needs: type and settings, file names, rows per shard, server address.
    """

    kind: str
    count: int
    corpus_sha256: str | None
    paragraphs_sha256: str
    encoder: dict[str, Any] | None = None
    index: dict[str, Any] = field(default_factory=dict)
    schema: str = SCHEMA


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Write or replace the manifest in one step."""
    write_json(directory / MANIFEST, asdict(manifest))


def read_manifest(directory: str | Path) -> Manifest:
    """The manifest of an index directory.

    Raises FileNotFoundError where there is no finished index, ValueError where the manifest is damaged or of another
    version; both say what to do.
    """
    directory = Path(directory)
    file = directory / MANIFEST
    if not file.is_file():
        if (directory / PLAN).is_file():
            raise FileNotFoundError(
                f"{directory}: its index is not finished; run the same build again, it goes on"
            )
        raise FileNotFoundError(f"{directory}: holds no index (manifest.json); build one first")
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
        if record.get("schema") != SCHEMA:
            raise ValueError(f"schema is {record.get('schema')!r}, this version reads {SCHEMA!r}")
        manifest = Manifest(**record)
        if manifest.kind not in KINDS or manifest.count < 1:
            raise ValueError(f"kind {manifest.kind!r} with {manifest.count} paragraphs")
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{file}: no manifest of an index ({error}); build the index again") from None
    return manifest


def check_encoder(directory: Path, manifest: Manifest, encoder: EncoderIdentity) -> None:
    """Raises ValueError naming every difference between the encoder in use and the one the index was built with."""
    stored, offered = dict(manifest.encoder or {}), encoder.record()
    names = f"{stored.get('name')} (index) and {offered.pop('name')} (in use)"
    lines = [
        f"{key}: index {stored.get(key)!r}, in use {value!r}"
        for key, value in offered.items()
        if stored.get(key) != value
    ]
    if lines:
        raise ValueError(
            f"{directory}: built with another encoder, {names}; {'; '.join(lines)}. "
            "Open it with the encoder it was built with, or build it again with the one in use"
        )


def check_corpus(directory: Path, manifest: Manifest, corpus: Path, sha256: str) -> None:
    """Raises ValueError where the index was built from another file than `corpus`."""
    if manifest.corpus_sha256 != sha256:
        raise ValueError(
            f"{directory}: built from another corpus; sha256: index {manifest.corpus_sha256}, {corpus} {sha256}. "
            "Build it again from this file, or open it without naming a corpus"
        )


def check_store(directory: Path, manifest: Manifest, count: int, digest: str) -> None:
    """Raises ValueError where the paragraphs are not those that were indexed. count, digest: of the whole store."""
    if count < manifest.count or (count == manifest.count and digest != manifest.paragraphs_sha256):
        raise ValueError(
            f"{directory}: {STORE} does not belong to this index; paragraphs: index {manifest.count}, file {count}; "
            f"sha256: index {manifest.paragraphs_sha256}, file {digest}. Build the index again"
        )


def write_json(file: Path, record: dict[str, Any]) -> None:
    """Write or replace a JSON file in one step."""
    partial = file.with_name(file.name + ".partial")
    partial.write_text(json.dumps(record, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    partial.replace(file)
