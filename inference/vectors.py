"""Paragraph vectors on disk: shards of fixed size, each a memory-mapped .npy file.

In:  the rows of a paragraph store, an encoder. Out: DIR/vectors/00000.npy, … (float32 [rows, D]).

A shard appears whole; one that is there is not encoded again, and each is encoded by itself, so a build that was killed
and went on has the bytes of one that was not. Legend: N rows, D dimension.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate
from pathlib import Path

import numpy as np

from inference.corpus import ParagraphStore
from inference.encoders import Encoder
from inference.progress import progress

FOLDER = "vectors"
_OPEN_SHARDS = 64  # a mapped file costs a file descriptor


class VectorShards:
    """The vectors of rows 0 … N - 1, `rows` of them in each shard. Safe to share between threads."""

    def __init__(self, directory: Path, rows: Sequence[int], dim: int):
        self.directory, self.rows, self.dim = directory / FOLDER, list(rows), dim
        self._ends = np.asarray([0, *accumulate(self.rows)])
        self._shard = lru_cache(maxsize=_OPEN_SHARDS)(self._map)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def take(self, rows: Sequence[int]) -> np.ndarray:
        """float32 [len(rows), D], in that order."""
        out_ND = np.empty((len(rows), self.dim), dtype=np.float32)
        for place, row in enumerate(rows):
            shard = int(np.searchsorted(self._ends, row, side="right")) - 1
            out_ND[place] = self._shard(shard)[row - self._ends[shard]]
        return out_ND

    def blocks(self, start: int = 0) -> Iterator[np.ndarray]:
        """The vectors from row `start` on, a shard at a time."""
        for number in range(len(self.rows)):
            if self._ends[number + 1] > start:
                yield np.asarray(self._shard(number)[max(0, start - self._ends[number]) :])

    def _map(self, number: int) -> np.ndarray:
        return open_shard(self.directory / f"{number:05d}.npy", self.rows[number], self.dim)


def open_shard(file: Path, rows: int, dim: int) -> np.ndarray:
    """A shard, memory-mapped. FileNotFoundError, or ValueError where it is damaged or of another size."""
    if not file.is_file():
        raise FileNotFoundError(f"{file}: missing; build the index again")
    try:
        vectors_ND = np.load(file, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ValueError(f"{file}: damaged ({error}); delete it and build the index again") from None
    if vectors_ND.shape != (rows, dim) or vectors_ND.dtype != np.float32:
        raise ValueError(
            f"{file}: holds {vectors_ND.shape} {vectors_ND.dtype}, expected {(rows, dim)} float32; "
            "delete it and build the index again"
        )
    return vectors_ND


def encode_shards(
    directory: Path, store: ParagraphStore, encoder: Encoder, shard_rows: int, show_progress: bool
) -> list[int]:
    """Encode every row of the store that has no shard yet; returns the rows of each shard."""
    folder, dim, total = directory / FOLDER, encoder.identity.dim, len(store)
    folder.mkdir(exist_ok=True)
    sizes = [min(shard_rows, total - start) for start in range(0, total, shard_rows)]
    with progress(f"encode {total} paragraphs", total, show_progress) as advance:
        for number, size in enumerate(sizes):
            file, start = folder / f"{number:05d}.npy", number * shard_rows
            if file.is_file():
                open_shard(file, size, dim)
                advance(size)
            else:
                write_shard(file, encoder.encode_paragraphs(store.read(start, start + size), advance))
    return sizes


def write_shard(file: Path, vectors_ND: np.ndarray) -> None:
    """Write a shard in one step. Raises OSError where the disk is full."""
    partial = file.with_name(file.name + ".partial")
    try:
        with partial.open("wb") as handle:
            np.save(handle, np.ascontiguousarray(vectors_ND, dtype=np.float32), allow_pickle=False)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise OSError(
            f"{file}: cannot be written ({error}); free some space and run the same again"
        ) from None
    partial.replace(file)
