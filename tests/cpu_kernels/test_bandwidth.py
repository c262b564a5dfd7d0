"""The DRAM measurement reads every word, in every thread, and ends when one thread fails."""

from __future__ import annotations

import os

import numpy as np
import pytest

from hetero_cpu_kernels.bandwidth import default_buffer_bytes, dram_read_gb_s, sum_streams


@pytest.mark.parametrize("columns", [1, 63, 4096], ids=lambda n: f"[8,{n}]")
def test_the_kernel_reads_every_word(columns: int) -> None:
    words = np.random.default_rng(0).integers(0, 2**64, (8, columns), dtype=np.uint64)
    assert int(sum_streams(words)) == int(words.sum(dtype=np.uint64))


@pytest.mark.parametrize("threads", [1, 3])
def test_a_rate_comes_out(threads: int) -> None:
    assert dram_read_gb_s(threads, buffer_bytes=1 << 20, repeats=3) > 0


def test_binding_leaves_the_caller_where_it_was() -> None:
    before = os.sched_getaffinity(0)
    assert dram_read_gb_s(1, cpus=[min(before)], buffer_bytes=1 << 20, repeats=1) > 0
    assert os.sched_getaffinity(0) == before


def test_a_thread_that_fails_does_not_leave_the_others_waiting() -> None:
    usable = min(os.sched_getaffinity(0))
    with pytest.raises(OSError, match="Invalid argument"):
        dram_read_gb_s(2, cpus=[usable, 1000], buffer_bytes=1 << 20)


def test_impossible_requests_are_refused() -> None:
    with pytest.raises(ValueError, match="2 threads cannot be bound"):
        dram_read_gb_s(2, cpus=[0])
    with pytest.raises(ValueError, match="too small for 4 threads"):
        dram_read_gb_s(4, buffer_bytes=64)


def test_the_buffer_is_larger_than_any_cache_and_bounded() -> None:
    assert 256 << 20 <= default_buffer_bytes() <= 1 << 30
