"""Packing keeps every bit or says that a record does not fit; compiled and reference packer agree."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_gpu.packed import PackedLayout
from hetero_gpu.packed.layout import CHUNK_ELEMENTS, PAGE_BYTES
from hetero_gpu.packed.pack import encode, measure
from hetero_gpu.packed.reference import Bytes, pack_reference, unpack_reference
from tests.gpu.packed.records import SIZES, SPECIAL, as_bytes, bf16, weights


def pack(plain: Bytes, layout: PackedLayout) -> Bytes | None:
    """Packed by the compiled functions, into memory that held something else."""
    table = np.empty(layout.num_chunks + 1, dtype=np.uint32)
    if measure(plain, table) > layout.capacity:
        return None
    packed = np.zeros(layout.packed_bytes, dtype=np.uint8)
    packed[: layout.escapes_at] = 0xA5
    encode(plain, packed, table=table, layout=layout)
    return packed


def assert_survives(elements: np.ndarray) -> None:
    layout, plain = PackedLayout(len(elements)), as_bytes(elements)
    packed = pack(plain, layout)
    assert packed is not None
    assert np.array_equal(unpack_reference(packed, layout), plain)


@pytest.mark.parametrize("num_elements", SIZES, ids=lambda n: f"elements{n}")
def test_weights_survive(num_elements: int) -> None:
    assert_survives(weights(num_elements))


def test_every_pattern_survives_among_weights() -> None:
    for part in np.arange(1 << 16, dtype=np.uint16).reshape(128, -1):
        elements = bf16(np.random.default_rng(1).standard_normal(CHUNK_ELEMENTS + 1024))
        elements[CHUNK_ELEMENTS - 256 : CHUNK_ELEMENTS + 256] = part  # across a border
        assert_survives(elements)


@pytest.mark.parametrize("bits", SPECIAL.tolist(), ids=hex)
def test_a_record_of_one_pattern_has_no_escapes(bits: int) -> None:
    layout, table = PackedLayout(4096), np.empty(2, dtype=np.uint32)
    elements = np.full(4096, bits, dtype=np.uint16)
    assert measure(as_bytes(elements), table) == 0
    assert_survives(elements)
    assert layout.num_chunks == 1


@st.composite
def records(draw: st.DrawFn) -> np.ndarray:
    """Any bits, weights, and mixtures of both."""
    num_elements = 32 * draw(st.integers(1, 2 * CHUNK_ELEMENTS // 32 + 3))
    rng = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    scale = 2.0 ** draw(st.integers(-130, 120))
    with np.errstate(over="ignore", under="ignore"):
        elements = bf16(rng.standard_normal(num_elements) * scale)
    share = draw(st.sampled_from([0.0, 1e-3, 1 / 256, 0.02, 1.0]))
    is_noise = rng.random(num_elements) < share
    elements[is_noise] = rng.integers(0, 1 << 16, int(is_noise.sum()))
    for index, bits in draw(st.lists(st.tuples(st.integers(0, num_elements - 1), st.integers(0, 0xFFFF)))):
        elements[index] = bits
    return elements


@settings(max_examples=150, deadline=None)
@given(records())
def test_packing_keeps_every_bit_or_says_that_it_does_not_fit(elements: np.ndarray) -> None:
    layout, plain = PackedLayout(len(elements)), as_bytes(elements)
    expected, packed = pack_reference(plain, layout), pack(plain, layout)
    assert (packed is None) == (expected is None)
    if packed is not None and expected is not None:
        assert np.array_equal(packed, expected)
        assert np.array_equal(unpack_reference(packed, layout), plain)


@pytest.mark.parametrize("excess", [0, 1])
def test_capacity_is_used_to_the_last_escape(excess: int) -> None:
    elements = np.full(3 * CHUNK_ELEMENTS, 0x3F80, dtype=np.uint16)
    layout = PackedLayout(len(elements))
    elements[-(layout.capacity + excess) :] = 0x0080  # 126 exponents below
    packed = pack(as_bytes(elements), layout)
    assert (packed is None) == bool(excess)
    assert (pack_reference(as_bytes(elements), layout) is None) == bool(excess)
    if packed is not None:
        assert np.array_equal(unpack_reference(packed, layout), as_bytes(elements))


@pytest.mark.parametrize("num_elements", [32, 2048, 6144, 24576, 4_718_592, 88_080_384])
def test_parts_lie_apart_and_aligned(num_elements: int) -> None:
    layout = PackedLayout(num_elements)
    starts = (0, layout.codes_at, layout.table_at, layout.escapes_at)
    assert [start % 16 for start in starts] == [0] * 4
    assert layout.table_at == num_elements * 3 // 2
    assert layout.escapes_at >= layout.table_at + 4 * (layout.num_chunks + 1)
    assert layout.packed_bytes % PAGE_BYTES == 0
    assert layout.capacity >= num_elements // 256
    assert layout.escapes_at + 4 * layout.capacity <= layout.packed_bytes


def test_a_large_record_takes_three_quarters() -> None:
    layout = PackedLayout.of(2 * 4_718_592)
    assert layout is not None
    assert 0.75 < layout.packed_bytes / layout.plain_bytes < 0.76


@pytest.mark.parametrize("record_bytes", [4096, 12288, 100])
def test_small_records_are_not_worth_it(record_bytes: int) -> None:
    assert PackedLayout.of(record_bytes) is None


def test_a_layout_is_of_whole_groups() -> None:
    with pytest.raises(ValueError, match="40 elements: not a multiple of 32"):
        PackedLayout(40)
