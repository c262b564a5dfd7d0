"""Direct reads of the disk under the model: how fast the host bank can be filled.

Direct reads go past the page cache, as loading does: the cache would otherwise hold every expert a
second time. Several threads keep a queue of reads in flight, each into a page-aligned buffer.
"""

from __future__ import annotations

import itertools
import mmap
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from hetero_runtime.doctor.base import BANK_GB, EXPERT, Finding, expert_ms

BLOCK_BYTES = 4 << 20
_THREADS = 8
_SAMPLE_BYTES = 256 << 20
_MOST_SECONDS = 2.0
_SLOW_GB_S = 0.5


def check(folder: Path) -> list[Finding]:
    """Read a weight file of `folder`, or a temporary file there when it holds none."""
    place = folder if folder.is_dir() else folder.parent
    if not hasattr(os, "O_DIRECT"):
        return [
            Finding("disk", None, "", "absent", "this system has no direct reads: loading uses the cache")
        ]
    try:
        with _sample(place) as file:
            return [_measure(file, place)]
    except OSError as error:
        meaning = f"nothing could be measured in {place} ({error.strerror}): name a folder with a model in it"
        return [Finding("disk", None, "", "absent", meaning)]


def direct_read_gb_s(file: Path, *, threads: int = _THREADS, seconds: float = _MOST_SECONDS) -> float:
    """GB/s of direct reads of `file`, whole blocks of 4 MiB, for at most `seconds`.

    Raises OSError where direct reads are refused, and ValueError for a file shorter than one block.
    """
    blocks = file.stat().st_size // BLOCK_BYTES
    if blocks < 1:
        raise ValueError(f"{file} is shorter than {BLOCK_BYTES} bytes")
    descriptor = os.open(file, os.O_RDONLY | os.O_DIRECT)
    try:
        return _read_blocks(descriptor, range(blocks), threads=threads, seconds=seconds)
    finally:
        os.close(descriptor)


def _read_blocks(descriptor: int, blocks: range, *, threads: int, seconds: float) -> float:
    todo = iter(blocks)
    done = itertools.count()  # next() is atomic, so it counts for all threads
    lock = threading.Lock()
    start = time.perf_counter()

    def read_queue(index: int) -> None:
        with mmap.mmap(-1, BLOCK_BYTES) as buffer:  # anonymous memory: aligned to a page
            while time.perf_counter() - start < seconds:
                with lock:
                    block = next(todo, None)
                if block is None:
                    return
                os.preadv(descriptor, [buffer], block * BLOCK_BYTES)
                next(done)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(read_queue, range(threads)))
    return next(done) * BLOCK_BYTES / (time.perf_counter() - start) / 1e9


@contextmanager
def _sample(place: Path) -> Iterator[Path]:
    """The largest weight file of `place`, or a temporary file in it. Raises OSError when it takes none."""
    weights = sorted(place.glob("*.safetensors"), key=lambda file: file.stat().st_size)
    if weights and weights[-1].stat().st_size >= _SAMPLE_BYTES // 4:
        yield weights[-1]
        return
    with tempfile.TemporaryFile(dir=place) as file:  # without a name: nothing can be left behind
        pattern = os.urandom(BLOCK_BYTES)  # random, for disks that compress
        for _ in range(_SAMPLE_BYTES // BLOCK_BYTES):
            file.write(pattern)
        file.flush()
        os.fsync(file.fileno())
        yield Path(f"/proc/self/fd/{file.fileno()}")


def _measure(file: Path, place: Path) -> Finding:
    try:
        gb_s = direct_read_gb_s(file)
    except OSError as error:
        meaning = (
            f"direct reads are refused in {place} ({error.strerror}): loading goes through the page cache, "
            "which needs room beside the bank; keep models on a local disk"
        )
        return Finding("disk, direct", None, "", "warn", meaning)
    meaning = (
        f"{BANK_GB} GB of experts load in {BANK_GB / gb_s:.0f} s; {EXPERT} takes {expert_ms(gb_s):.1f} ms"
    )
    return Finding("disk, direct", round(gb_s, 2), "GB/s", "warn" if gb_s < _SLOW_GB_S else "ok", meaning)
