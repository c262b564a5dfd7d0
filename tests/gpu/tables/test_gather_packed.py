"""Packed records that cross from the bank into slabs: plain when they arrive, counted as they crossed."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hetero_gpu import SlabPool
from hetero_gpu.packed import PackedLayout
from hetero_gpu.packed.layout import CHUNK_ELEMENTS
from hetero_gpu.packed.reference import pack_reference
from hetero_gpu.tables import MappedBank, gather, gather_reference
from tests.gpu.packed.records import as_bytes, weights
from tests.gpu.tables.test_gather import NUM_EXPERTS, NUM_LAYERS, NUM_SLOTS, listed

SIZES = (32, 2048, CHUNK_ELEMENTS + 96, 2 * CHUNK_ELEMENTS)


def num_crossing(packed: np.ndarray, layout: PackedLayout) -> int:
    """Bytes that are read of one packed record: twelve bits an element, two table words a chunk, escapes."""
    num_escapes = int(packed[layout.table_at : layout.escapes_at].view(np.uint32)[layout.num_chunks]) >> 8
    return layout.num_elements * 3 // 2 + 8 * layout.num_chunks + 4 * num_escapes


@pytest.mark.parametrize("num_programs", [1, 3, 32], ids=lambda n: f"programs{n}")
@pytest.mark.parametrize("num_elements", SIZES, ids=lambda n: f"elements{n}")
@pytest.mark.parametrize("misses", [[], [(4, 5)], [(0, 2), (3, 0), (1, 5)]], ids=lambda m: f"misses{len(m)}")
def test_gather_of_packed_records_equals_reference(
    device: torch.device, misses: list[tuple[int, int]], num_elements: int, num_programs: int
) -> None:
    tables, layout = listed(device, misses), PackedLayout(num_elements)
    plain = np.stack([as_bytes(weights(num_elements, seed=i)) for i in range(NUM_LAYERS * NUM_EXPERTS)])
    rows = [row for row in (pack_reference(record, layout) for record in plain) if row is not None]
    packed = torch.from_numpy(np.stack(rows))
    slabs, expected = (SlabPool(NUM_SLOTS, layout.plain_bytes, device) for _ in range(2))
    slabs.memory.fill_(0xA5)
    expected.memory.fill_(0xA5)
    gather_reference(tables, torch.from_numpy(plain), expected)
    if device.type == "cpu":
        bank = MappedBank(packed.data_ptr(), layout.packed_bytes, layout)
    else:
        packed = packed.pin_memory()
        bank = MappedBank.of(packed.view(-1), layout.packed_bytes, layout)
    for _ in range(2):  # the second finds what the first left behind
        gather(tables, 1, bank=bank, slabs=slabs, num_programs=num_programs)
    assert torch.equal(slabs.memory, expected.memory)
    assert tables.stats().bytes_moved == 2 * sum(num_crossing(rows[key], layout) for _, key in misses)
    assert tables.programs_done.item() == 0
    assert tables.pause.item() == 0  # the worker may go on


def test_a_layout_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match="records of 8192 bytes, packed in a layout of 4096"):
        MappedBank(0, 8192, PackedLayout(2048))


def test_slabs_must_have_room_for_plain_records() -> None:
    layout = PackedLayout(CHUNK_ELEMENTS)
    tables = listed(torch.device("cpu"), [])
    slabs = SlabPool(NUM_SLOTS, layout.packed_bytes, torch.device("cpu"))
    with pytest.raises(ValueError, match="5 slots and records of 32768"):
        gather(tables, 0, bank=MappedBank(0, layout.packed_bytes, layout), slabs=slabs)
