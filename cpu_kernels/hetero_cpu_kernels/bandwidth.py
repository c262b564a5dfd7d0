"""How fast this machine reads memory: the roof of every expert that is computed where it lies.

At one token an expert MLP reads each weight once, so its time is its bytes over this number. The
measurement reads as the kernels do: plain Python threads over static chunks, a compiled loop that
releases the GIL, and several streams a thread, because one stream alone does not keep enough cache
lines in flight to fill a memory channel.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, BrokenBarrierError

import numba
import numpy as np
from numpy.typing import NDArray

from hetero_cpu_kernels.topology import read_topology

_STREAMS = 8
_WORD_BYTES = 8
_LEAST_BYTES = 256 << 20
_MOST_BYTES = 1 << 30
_CACHES = 8  # the buffer holds this many times the last-level cache, within the two limits


@numba.njit("uint64(uint64[:, ::1])", nogil=True)
def sum_streams(words: NDArray[np.uint64]) -> np.uint64:
    """Sum of `words` [8, n], reading all eight rows at the same pace."""
    a = b = c = d = e = f = g = h = np.uint64(0)
    for i in range(words.shape[1]):
        a += words[0, i]
        b += words[1, i]
        c += words[2, i]
        d += words[3, i]
        e += words[4, i]
        f += words[5, i]
        g += words[6, i]
        h += words[7, i]
    return a + b + c + d + e + f + g + h


def dram_read_gb_s(
    threads: int, *, cpus: Sequence[int] | None = None, buffer_bytes: int | None = None, repeats: int = 7
) -> float:
    """GB/s (10^9 bytes) that `threads` threads read from memory together; median of `repeats` passes.

    `cpus` binds thread i to processor cpus[i], and its chunk to that processor's NUMA node, since a
    thread touches its own chunk first. `buffer_bytes` is the total read in one pass (None: eight times
    the last-level cache, between 256 MiB and 1 GiB). Raises ValueError when there are fewer processors
    than threads or the buffer is smaller than one word a stream, OSError for a processor that this
    process may not use.
    """
    if threads < 1 or (cpus is not None and len(cpus) < threads):
        raise ValueError(f"{threads} threads cannot be bound to processors {cpus}: give one for each")
    total = default_buffer_bytes() if buffer_bytes is None else buffer_bytes
    columns = total // (threads * _STREAMS * _WORD_BYTES)
    if columns < 1:
        raise ValueError(f"a buffer of {total} bytes is too small for {threads} threads")
    passes = zip(*_read_together(threads, columns, cpus=cpus, repeats=repeats), strict=True)
    # A pass lasts from the first thread's start to the last thread's end.
    spans = [max(end for _, end in times) - min(start for start, _ in times) for times in passes]
    return threads * columns * _STREAMS * _WORD_BYTES / float(statistics.median(spans)) / 1e9


def default_buffer_bytes() -> int:
    """Bytes of a buffer that the last-level caches cannot hold."""
    return min(_MOST_BYTES, max(_LEAST_BYTES, _CACHES * read_topology().cache_bytes))


def _read_together(
    threads: int, columns: int, *, cpus: Sequence[int] | None, repeats: int
) -> list[list[tuple[float, float]]]:
    """For each thread, the start and the end of each pass over its own chunk [8, columns]."""
    barrier = Barrier(threads)

    def read_chunk(index: int) -> list[tuple[float, float]]:
        try:
            if cpus is not None and hasattr(os, "sched_setaffinity"):
                os.sched_setaffinity(0, {cpus[index]})  # of this thread only
            chunk = np.full((_STREAMS, columns), index, dtype=np.uint64)
            return [_timed_pass(chunk, barrier) for _ in range(repeats)]
        except BaseException:
            barrier.abort()  # the others must not wait for this thread
            raise

    with ThreadPoolExecutor(threads) as pool:
        futures = [pool.submit(read_chunk, index) for index in range(threads)]
    failures = [error for future in futures if (error := future.exception()) is not None]
    for error in sorted(failures, key=lambda error: isinstance(error, BrokenBarrierError)):
        raise error  # the cause comes before the barriers that it broke
    return [future.result() for future in futures]


def _timed_pass(chunk: NDArray[np.uint64], barrier: Barrier) -> tuple[float, float]:
    barrier.wait()
    start = time.perf_counter()
    sum_streams(chunk)
    return start, time.perf_counter()
