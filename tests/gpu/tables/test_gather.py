"""Records that cross from the bank into slabs, against the obvious copy."""

from __future__ import annotations

import pytest
import torch

from hetero_gpu import SlabPool
from hetero_gpu.tables import DeviceTables, MappedBank, gather, gather_reference

NUM_LAYERS, NUM_EXPERTS, NUM_SLOTS = 2, 3, 5


def listed(device: torch.device, misses: list[tuple[int, int]]) -> DeviceTables:
    """Tables with this miss list, as `ensure` leaves them."""
    tables = DeviceTables(
        num_slots=NUM_SLOTS, num_layers=NUM_LAYERS, num_experts=NUM_EXPERTS, max_pairs=4, device=device
    )
    for i, (slot, key) in enumerate(misses):
        tables.miss_slot[i], tables.miss_key[i] = slot, key
    tables.miss_count.fill_(len(misses))
    tables.pause.fill_(bool(misses))
    return tables


def pools(device: torch.device, record_bytes: int) -> tuple[torch.Tensor, MappedBank, SlabPool, SlabPool]:
    """Records, their bank, and two equal pools of slabs with poison in them."""
    records = torch.randint(0, 256, (NUM_LAYERS * NUM_EXPERTS, record_bytes), dtype=torch.uint8)
    slabs, expected = (SlabPool(NUM_SLOTS, record_bytes, device) for _ in range(2))
    for pool in (slabs, expected):
        pool.memory.fill_(0xA5)
    if device.type == "cpu":
        return records, MappedBank(records.data_ptr(), record_bytes), slabs, expected
    records = records.pin_memory()
    return records, MappedBank.of(records.view(-1), record_bytes), slabs, expected


@pytest.mark.parametrize("num_programs", [1, 3, 8], ids=lambda n: f"programs{n}")
@pytest.mark.parametrize("record_bytes", [16, 4096, 32768 + 16, 98304], ids=lambda n: f"record{n}")
@pytest.mark.parametrize("misses", [[], [(4, 5)], [(0, 2), (3, 0), (1, 5)]], ids=lambda m: f"misses{len(m)}")
def test_gather_equals_reference(
    device: torch.device, misses: list[tuple[int, int]], record_bytes: int, num_programs: int
) -> None:
    tables = listed(device, misses)
    records, bank, slabs, expected = pools(device, record_bytes)
    gather_reference(tables, records, expected)
    for _ in range(2):  # the second finds what the first left behind
        gather(tables, 1, bank=bank, slabs=slabs, num_programs=num_programs)
    assert torch.equal(slabs.memory, expected.memory)
    assert tables.stats().bytes_moved == 2 * len(misses) * record_bytes
    assert tables.programs_done.item() == 0
    assert tables.pause.item() == 0  # the worker may go on


def test_slabs_of_another_size_are_refused() -> None:
    tables = listed(torch.device("cpu"), [])
    _, bank, _, _ = pools(torch.device("cpu"), 64)
    with pytest.raises(ValueError, match="5 slabs of 128 bytes do not fit 5 slots and records of 64"):
        gather(tables, 0, bank=bank, slabs=SlabPool(NUM_SLOTS, 128, torch.device("cpu")))


@pytest.mark.parametrize(("address", "record_bytes"), [(8, 64), (64, 40)])
def test_a_bank_off_sixteen_bytes_is_refused(address: int, record_bytes: int) -> None:
    with pytest.raises(ValueError, match="both must be multiples of 16"):
        MappedBank(address, record_bytes)
