"""What the disk gives: direct reads of whole files, nothing done with the bytes.

The roof that loading is held to, so it is read with the same number of threads, but by code of its own: large
aligned blocks, each thread into a page-aligned buffer that it overwrites.
"""

from __future__ import annotations

import mmap
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

BLOCK_BYTES = 16 << 20


def direct_read_gb_s(files: Sequence[Path], *, threads: int, most_bytes: int | None = None) -> float:
    """GB/s of reading all `files` once, around the page cache; of each no more than `most_bytes`.

    Raises OSError where the file system refuses direct reads.
    """
    descriptors = [os.open(file, os.O_RDONLY | os.O_DIRECT) for file in files]
    try:
        blocks = [
            (descriptor, begin)
            for descriptor in descriptors
            for begin in range(0, min(os.fstat(descriptor).st_size, most_bytes or sys.maxsize), BLOCK_BYTES)
        ]
        began = time.perf_counter()
        with ThreadPoolExecutor(threads) as pool:
            num_bytes = sum(pool.map(_read_some, [blocks[i::threads] for i in range(threads)]))
        return num_bytes / (time.perf_counter() - began) / 1e9
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def best_read_gb_s(file: Path, *, threads: int, looks: int = 2, most_bytes: int | None = None) -> float:
    """The best of several direct reads of `file`: on a shared disk one alone can be half of it, and what is
    held to such a roof looks better than it is."""
    drop_from_page_cache([file])
    rates = [direct_read_gb_s([file], threads=threads, most_bytes=most_bytes) for _ in range(looks)]
    return max(rates)


def drop_from_page_cache(files: Sequence[Path]) -> None:
    """Make the next read of `files` come from the disk."""
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)  # only clean pages can be dropped
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def filesystem_of(path: Path) -> str:
    """Type of the file system that holds `path`, such as ext4: a reader of the numbers wants to know."""
    mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text(encoding="utf-8").splitlines()]
    holding = [(point, kind) for point, kind in mounts if path.resolve().is_relative_to(point)]
    return max(holding, key=lambda mount: len(mount[0]))[1] if holding else "unknown"


def _read_some(blocks: Sequence[tuple[int, int]]) -> int:
    """Read blocks given by descriptor and offset. Returns the bytes read."""
    with mmap.mmap(-1, BLOCK_BYTES) as buffer:
        return sum(os.preadv(descriptor, [buffer], offset) for descriptor, offset in blocks)
