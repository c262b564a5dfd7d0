"""What landed packed and what is late: one launch brings both, and counts, and gives back."""

from __future__ import annotations

import pytest
import torch

from hetero_gpu import SlabPool
from hetero_gpu.control import Landed, Word
from hetero_gpu.packed import PackedLayout
from hetero_gpu.packed.layout import CHUNK_ELEMENTS
from hetero_gpu.tables import Landings, MappedBank, await_late, ensure, unpack_landed
from tests.gpu.tables.test_gather_packed import num_crossing
from tests.gpu.tables.test_prefetch import NUM_EXPERTS, RECORD_BYTES, Setting, packed_records

LAYOUT = PackedLayout(CHUNK_ELEMENTS + 96)


class Packed:
    """Layer 1 runs experts 1 and 2, which were prefetched; those of `arrived` lie in staging buffers."""

    def __init__(self, device: torch.device, arrived: list[int]) -> None:
        self.setting = Setting(device, num_slots=4)
        self.tables, self.device = self.setting.tables, device
        self.plain, self.packed = packed_records(LAYOUT)
        self.bank = MappedBank(self.packed.data_ptr(), LAYOUT.packed_bytes, LAYOUT)
        if device.type == "cuda":
            self.packed = self.packed.pin_memory()
            self.bank = MappedBank.of(self.packed.view(-1), LAYOUT.packed_bytes, LAYOUT)
        self.staging = torch.zeros(3, LAYOUT.packed_bytes, dtype=torch.uint8, device=device)
        self.slabs = SlabPool(4, LAYOUT.plain_bytes, device)
        self.slabs.memory.fill_(0xA5)
        self.prefetch(arrived)
        self.slots = ensure(self.tables, 1, torch.tensor([[1, 2]], device=device), awaits_late=True)
        landings = Landings(self.setting.region, LAYOUT.packed_bytes, is_staged=True)
        await_late(self.tables, self.slots, landings)
        self.setting.sync()

    def prefetch(self, arrived: list[int]) -> None:
        self.setting.prefetch(0, [NUM_EXPERTS + 1, NUM_EXPERTS + 2])
        for key, slot, tag, _ in self.setting.take():
            buffer = 2 * (key % 2)
            if key - NUM_EXPERTS in arrived:
                self.staging[buffer] = self.packed[key].to(self.device)
                self.setting.report(slot, tag, Landed.ARRIVED, buffer=buffer)
            else:
                self.setting.report(slot, tag, Landed.DROPPED)

    def unpack(self, late_layer: int | None) -> int:
        """Returns the bytes that it counted."""
        before = self.tables.stats().bytes_moved
        unpack_landed(
            self.tables,
            region=self.setting.region,
            staging=self.staging,
            bank=self.bank,
            slabs=self.slabs,
            late_layer=late_layer,
        )
        self.setting.sync()
        return self.tables.stats().bytes_moved - before


@pytest.mark.parametrize("arrived", [[], [1], [2], [1, 2]], ids=lambda each: f"arrived{len(each)}")
def test_what_landed_and_what_is_late_come_in_one_launch(device: torch.device, arrived: list[int]) -> None:
    case = Packed(device, arrived)
    late = [NUM_EXPERTS + expert for expert in (1, 2) if expert not in arrived]
    assert case.tables.late_count.item() == len(late)
    assert case.setting.region.read(Word.PAUSE) == int(len(late) > 0)
    moved = case.unpack(late_layer=1)
    assert moved == sum(num_crossing(case.packed[key].numpy(), LAYOUT) for key in late)
    expected = case.plain[NUM_EXPERTS + 1 : NUM_EXPERTS + 3]
    assert torch.equal(case.slabs.memory[case.slots[0].long()].cpu(), expected)
    assert case.setting.region.read(Word.CONSUMED) == 2
    assert case.setting.region.read(Word.PAUSE) == 0
    assert case.tables.programs_done.item() == case.tables.landed_count.item() == 0


def test_what_was_late_before_is_left_alone(device: torch.device) -> None:
    case = Packed(device, [])
    case.unpack(late_layer=1)
    case.slabs.memory.fill_(0xA5)
    assert case.unpack(late_layer=None) == 0
    assert bool((case.slabs.memory == 0xA5).all())


def test_plain_banks_have_nothing_to_unpack(device: torch.device) -> None:
    setting = Setting(device, num_slots=4)
    with pytest.raises(ValueError, match="are not packed"):
        unpack_landed(
            setting.tables,
            region=setting.region,
            staging=torch.zeros(1, RECORD_BYTES, dtype=torch.uint8, device=device),
            bank=MappedBank(0, RECORD_BYTES),
            slabs=SlabPool(4, RECORD_BYTES, device),
        )
