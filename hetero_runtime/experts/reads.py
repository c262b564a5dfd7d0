"""Reads: which bytes of which file go where in the bank, and their grouping into large sequential extents.

file     ...|gate 0|up 0|down 0|gate 1|up 1|...      one extent: consecutive bytes, read at once
              │      │     │      │
bank     |rec 0: gate|up|down|  |rec 1: ...           its reads: copied out to where they belong
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

EXTENT_BYTES = 4 << 20
"""Long enough that a disk streams, short enough that scratch (one extent a thread) stays small."""

MAX_GAP_BYTES = 128 << 10
"""Unwanted bytes between two reads that are cheaper to read than to skip."""


class Scatter(NamedTuple):
    """A read whose elements land at strides: `shape` and `strides` in elements of `itemsize` bytes."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int


class Read(NamedTuple):
    """`num_bytes` at `offset` of `file`, to byte `target` of the bank: in one run, or scattered."""

    file: Path
    offset: int
    num_bytes: int
    target: int
    scatter: Scatter | None


@dataclass(frozen=True)
class Extent:
    """Reads of one file that lie close together, in the order of the file."""

    file: Path
    reads: tuple[Read, ...]

    @property
    def begin(self) -> int:
        """File offset of its first byte."""
        return self.reads[0].offset

    @property
    def end(self) -> int:
        """File offset after its last byte."""
        return self.reads[-1].offset + self.reads[-1].num_bytes

    @property
    def num_bytes(self) -> int:
        """Bytes that are wanted (the gaps between reads are not)."""
        return sum(read.num_bytes for read in self.reads)


def group_reads(reads: Iterable[Read], extent_bytes: int = EXTENT_BYTES) -> list[Extent]:
    """Extents in the order of files and offsets, none longer than `extent_bytes` where rows allow it."""
    pieces = [piece for read in reads for piece in split_read(read, extent_bytes)]
    pieces.sort(key=lambda read: (read.file, read.offset))
    extents: list[Extent] = []
    open_reads: list[Read] = []
    for piece in pieces:
        if open_reads and not _fits(open_reads, piece, extent_bytes):
            extents.append(Extent(open_reads[0].file, tuple(open_reads)))
            open_reads = []
        open_reads.append(piece)
    if open_reads:
        extents.append(Extent(open_reads[0].file, tuple(open_reads)))
    return extents


def longest_of(extents: Iterable[Extent]) -> int:
    """Bytes of the longest extent, gaps included."""
    return max((extent.end - extent.begin for extent in extents), default=EXTENT_BYTES)


def split_read(read: Read, max_bytes: int) -> Iterator[Read]:
    """The same read in pieces of at most `max_bytes`; a scattered one is cut between rows of axis 0."""
    if read.num_bytes <= max_bytes:
        yield read
        return
    if read.scatter is None:
        for begin in range(0, read.num_bytes, max_bytes):
            size = min(max_bytes, read.num_bytes - begin)
            yield Read(read.file, read.offset + begin, size, read.target + begin, None)
        return
    shape, strides, itemsize = read.scatter
    row_bytes = math.prod(shape[1:]) * itemsize
    rows_a_piece = max(1, max_bytes // row_bytes)
    for row in range(0, shape[0], rows_a_piece):
        num_rows = min(rows_a_piece, shape[0] - row)
        yield Read(
            read.file,
            read.offset + row * row_bytes,
            num_rows * row_bytes,
            read.target + row * strides[0] * itemsize,
            Scatter((num_rows, *shape[1:]), strides, itemsize),
        )


def _fits(open_reads: list[Read], piece: Read, extent_bytes: int) -> bool:
    first, last = open_reads[0], open_reads[-1]
    gap = piece.offset - (last.offset + last.num_bytes)
    is_near = piece.file == first.file and 0 <= gap <= MAX_GAP_BYTES
    return is_near and piece.offset + piece.num_bytes - first.offset <= extent_bytes
