"""Landings that the running layer awaits: they come, they come too late, they bring nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np
import torch

from hetero_gpu import SlabPool
from hetero_gpu.control import Landed, Word
from hetero_gpu.packed import PackedLayout
from hetero_gpu.packed.reference import pack_reference
from hetero_gpu.tables import Landings, MappedBank, Wanted, await_late, ensure, gather, land, unpack_landed
from hetero_gpu.tables.state import MOST_LOOKS
from hetero_scheduler import SlotState
from tests.gpu.packed.records import as_bytes, weights
from tests.gpu.tables.test_prefetch import NUM_EXPERTS, RECORD_BYTES, Setting

WANTED = NUM_EXPERTS + 1
"""The key of expert 1 in layer 1."""


class Awaiting:
    """Layer 0 has asked for WANTED, and layer 1 begins while that is on its way."""

    def __init__(self, device: torch.device) -> None:
        self.setting = Setting(device, num_slots=4)
        self.tables = self.setting.tables
        ensure(self.tables, 0, torch.tensor([[0]], device=device))
        self.setting.prefetch(0, [WANTED])
        _, self.slot, self.tag, _ = self.setting.take()[0]

    def layer_1(self, experts: list[int], *, wanted: list[int] | None = None) -> torch.Tensor:
        """Slots of `experts`, after the wait, before which `wanted` keys are asked for."""
        self.setting.land()
        device = self.setting.device
        slots = ensure(self.tables, 1, torch.tensor([experts], device=device), awaits_late=True)
        asked = None
        if wanted is not None:
            asked = Wanted(1, torch.tensor(wanted, dtype=torch.int32, device=device))
        await_late(self.tables, slots, self.setting.landings, wanted=asked)
        self.setting.sync()
        return slots

    def late(self) -> list[tuple[int, int]]:
        count = int(self.tables.late_count.item())
        return list(
            zip(self.tables.late_slot[:count].tolist(), self.tables.late_key[:count].tolist(), strict=True)
        )

    def state(self) -> SlotState:
        return SlotState(int(self.tables.slot_state[self.slot].item()))


def soon(report: Callable[[], None]) -> threading.Thread:
    """Report while the kernel looks."""

    def wait_and_report() -> None:
        time.sleep(0.02)
        report()

    thread = threading.Thread(target=wait_and_report)
    thread.start()
    return thread


def test_what_arrives_in_time_is_not_gathered(device: torch.device) -> None:
    case = Awaiting(device)
    reporter = soon(lambda: case.setting.report(case.slot, case.tag, Landed.ARRIVED))
    if device.type == "cuda":
        reporter.join()  # a kernel is faster than the thread
    slots = case.layer_1([1, 2, 1])
    reporter.join()
    assert slots[0, 0].item() == slots[0, 2].item() == case.slot
    assert case.late() == []
    assert case.state() is SlotState.USED
    assert case.tables.miss_count.item() == 1  # expert 2 alone
    assert case.tables.patience.item() == MOST_LOOKS
    stats = case.tables.stats()
    assert (stats.late + stats.hits, stats.prefetches_dropped) == (1, 0)
    assert stats.bytes_moved == RECORD_BYTES
    case.tables.check()


def test_what_is_dropped_is_gathered_at_once(device: torch.device) -> None:
    case = Awaiting(device)
    case.setting.land()
    reporter = soon(lambda: case.setting.report(case.slot, case.tag, Landed.DROPPED))
    slots = case.layer_1([1, 1])
    reporter.join()
    assert slots.tolist() == [[case.slot, case.slot]]
    if device.type == "cpu":  # the device may have lost its patience before the thread spoke
        assert case.state() is SlotState.USED
        assert case.tables.patience.item() == MOST_LOOKS
    assert case.late() == [(case.slot, WANTED)]
    case.tables.check()


def test_patience_ends_once_and_comes_back_with_a_landing(device: torch.device) -> None:
    case = Awaiting(device)
    case.layer_1([1])
    assert case.late() == [(case.slot, WANTED)]
    assert case.state() is SlotState.FETCH
    assert case.tables.patience.item() == 0
    case.layer_1([1])  # gathered: a hit, and nobody waits
    assert case.late() == []
    case.setting.prefetch(1, [WANTED + 1])
    _, slot, tag, _ = case.setting.take()[0]
    began = time.monotonic()
    case.layer_1([2])
    assert time.monotonic() - began < 2
    assert case.late() == [(slot, WANTED + 1)]
    case.setting.report(case.slot, case.tag, Landed.ARRIVED)
    case.setting.report(slot, tag, Landed.DROPPED)
    case.setting.land()
    assert case.tables.patience.item() == MOST_LOOKS
    assert case.state() is SlotState.COMPUTE
    assert case.tables.slot_state[slot].item() == SlotState.COMPUTE  # gathered, so it is kept
    case.tables.check()


def test_what_is_wanted_is_asked_for_before_the_wait(device: torch.device) -> None:
    case = Awaiting(device)
    case.setting.report(case.slot, case.tag, Landed.DROPPED)
    slots = case.layer_1([1, 2], wanted=[-1, WANTED + 1, 2 * NUM_EXPERTS + 3])
    asked = case.setting.take()
    assert [(key, deadline) for key, _, _, deadline in asked] == [(2 * NUM_EXPERTS + 3, 3)], (
        "the other is there"
    )
    assert asked[0][1] not in slots.flatten().tolist()
    assert case.late() == []  # dropped before `ensure`, which missed it
    case.setting.report(asked[0][1], asked[0][2], Landed.ARRIVED)
    case.setting.prefetch(1, [2 * NUM_EXPERTS + 4])
    case.setting.land()
    assert case.tables.slot_state[asked[0][1]].item() == SlotState.COMPUTE
    case.tables.check()


def test_a_late_expert_is_gathered_from_the_bank(device: torch.device) -> None:
    case = Awaiting(device)
    records = torch.randint(0, 256, (3 * NUM_EXPERTS, RECORD_BYTES), dtype=torch.uint8)
    bank = MappedBank(records.data_ptr(), RECORD_BYTES)
    if device.type == "cuda":
        records = records.pin_memory()
        bank = MappedBank.of(records.view(-1), RECORD_BYTES)
    slabs = SlabPool(4, RECORD_BYTES, device)
    slots = case.layer_1([1, 3])
    for is_late in (False, True):
        gather(case.tables, 1, bank=bank, slabs=slabs, is_late=is_late)
    for pair, expert in enumerate([1, 3]):
        assert torch.equal(slabs.slab(int(slots[0, pair])).cpu(), records[NUM_EXPERTS + expert])
    assert case.tables.pause.item() == 0
    assert case.tables.stats().bytes_moved == 2 * RECORD_BYTES


def test_packed_landings_are_decoded_and_their_buffers_freed(device: torch.device) -> None:
    layout, setting = PackedLayout(4096), Setting(device, num_slots=4)
    plain = [as_bytes(weights(layout.num_elements, seed=seed)) for seed in range(2)]
    packed = [pack_reference(record, layout) for record in plain]
    staging = torch.zeros(3, layout.packed_bytes, dtype=torch.uint8, device=device)
    slabs, tables = SlabPool(4, layout.plain_bytes, device), setting.tables
    bank = MappedBank(0, layout.packed_bytes, layout)  # of which nothing is read
    landings = Landings(setting.region, layout.packed_bytes, is_staged=True)
    slabs.memory.fill_(0xA5)

    def unpack() -> None:
        unpack_landed(tables, region=setting.region, staging=staging, bank=bank, slabs=slabs)
        setting.sync()

    ensure(tables, 0, torch.tensor([[0]], device=device))
    setting.prefetch(0, [WANTED, WANTED + 1])
    slots = []
    for buffer, (_, slot, tag, _) in zip((2, 0), setting.take(), strict=True):
        record = packed[len(slots)]
        assert record is not None
        staging[buffer] = torch.from_numpy(record).to(device)
        setting.report(slot, tag, Landed.ARRIVED, buffer=buffer)
        slots.append(slot)
    land(tables, landings)
    unpack()
    for slot, record in zip(slots, plain, strict=True):
        assert np.array_equal(slabs.slab(slot).cpu().numpy(), record)
    assert setting.region.read(Word.CONSUMED) == 2
    assert tables.landed_count.item() == 0
    setting.prefetch(0, [WANTED + 2])
    _, slot, tag, _ = setting.take()[0]
    setting.report(slot, tag - 1, Landed.ARRIVED, buffer=1)  # for nobody
    land(tables, landings)
    unpack()
    assert setting.region.read(Word.CONSUMED) == 3
    assert bool((slabs.slab(slot) == 0xA5).all())
    setting.region.write(Word.CONSUMED, -1)
    unpack()
    assert setting.region.read(Word.CONSUMED) == -1, "nothing has landed since"


def test_dropped_prefetches_leave_nothing_behind(device: torch.device) -> None:
    case = Awaiting(device)
    case.tables.drop_prefetches()
    assert case.setting.num_outstanding == 0
    for word in (Word.TASK_TAIL, Word.LANDING_TAIL, Word.CONSUMED):
        assert case.setting.region.read(word) == 1
    case.setting.land()
    case.tables.raise_if_failed()
    case.tables.to_machine(case.setting.twin.machine, case.setting.twin.eviction)
