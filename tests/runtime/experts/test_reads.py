"""Grouping reads into extents, and cutting the long ones."""

from __future__ import annotations

from pathlib import Path

import hypothesis.strategies as st
from hypothesis import given

from hetero_runtime.experts.reads import MAX_GAP_BYTES, Read, Scatter, group_reads, split_read

A, B = Path("a"), Path("b")


def plain(offset: int, num_bytes: int, *, file: Path = A) -> Read:
    return Read(file, offset, num_bytes, 10_000 + offset, None)


def test_neighbours_become_one_extent() -> None:
    (extent,) = group_reads([plain(200, 100), plain(100, 100), plain(300, 50)], extent_bytes=1000)
    assert (extent.begin, extent.end, extent.num_bytes) == (100, 350, 250)
    assert [read.offset for read in extent.reads] == [100, 200, 300]


def test_a_new_extent_for_a_new_file_a_wide_gap_or_a_full_one() -> None:
    far = 400 + MAX_GAP_BYTES + 1
    reads = [plain(0, 400), plain(far, 100), plain(far + 100, 901), plain(0, 10, file=B)]
    assert [extent.num_bytes for extent in group_reads(reads, extent_bytes=1000)] == [400, 100, 901, 10]


def test_gaps_do_not_count_as_wanted_bytes() -> None:
    (extent,) = group_reads([plain(0, 10), plain(500, 10)], extent_bytes=1000)
    assert (extent.end - extent.begin, extent.num_bytes) == (510, 20)


def test_a_long_read_is_cut_at_any_byte() -> None:
    pieces = list(split_read(plain(7, 25), 10))
    assert [(p.offset, p.num_bytes, p.target) for p in pieces] == [
        (7, 10, 10_007), (17, 10, 10_017), (27, 5, 10_027),
    ]  # fmt: skip


def test_a_long_scattered_read_is_cut_between_rows() -> None:
    read = Read(A, 0, 5 * 8, 100, Scatter((5, 4), (1, 5), 2))  # a [5, 4] of 2 bytes, transposed
    pieces = list(split_read(read, 17))
    assert [(p.offset, p.num_bytes, p.target) for p in pieces] == [(0, 16, 100), (16, 16, 104), (32, 8, 108)]
    assert [p.scatter.shape for p in pieces if p.scatter is not None] == [(2, 4), (2, 4), (1, 4)]


@given(
    st.lists(st.integers(0, 300), min_size=1, max_size=30, unique=True),
    st.integers(1, 700),
    st.randoms(use_true_random=False),
)
def test_every_byte_is_read_once(slots: list[int], extent_bytes: int, random: object) -> None:
    reads = [plain(slot * 50, 50) for slot in slots]
    random.shuffle(reads)  # type: ignore[attr-defined]
    extents = group_reads(reads, extent_bytes)
    wanted = sorted(byte for read in reads for byte in range(read.target, read.target + read.num_bytes))
    got = sorted(byte for e in extents for r in e.reads for byte in range(r.target, r.target + r.num_bytes))
    assert got == wanted
    assert all(extent.end - extent.begin <= max(extent_bytes, 50) for extent in extents)
