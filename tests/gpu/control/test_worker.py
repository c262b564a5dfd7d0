"""The worker's end of the protocol, with the test as the device: slow, failing and dead links."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from hetero_gpu import SlabPool
from hetero_gpu.control import ControlRegion, Landed, PrefetchWorker, Word
from hetero_gpu.control.region import NUM_HEAD_WORDS
from tests.gpu.control.fake_link import LINK_ERROR, FakeLink

NUM_KEYS, NUM_SLOTS, RECORD_BYTES, RING = 12, 4, 64, 4
FAR = 1 << 40
"""A deadline that never comes."""


class Device:
    """Writes tasks and reads landings as the kernels do, and owns bank, slabs and worker."""

    def __init__(self, link: FakeLink, num_buffers: int = 0, piece_bytes: int = RECORD_BYTES) -> None:
        self.link = link
        self.region = ControlRegion(torch.device("cpu"), ring_size=RING)
        self.bank = torch.randint(0, 256, (NUM_KEYS, RECORD_BYTES), dtype=torch.uint8)
        self.slabs = SlabPool(NUM_SLOTS, RECORD_BYTES, torch.device("cpu"))
        self._words = self.region._view
        self._tag = 0
        self.slabs.memory.fill_(0xA5)
        self.staging = torch.zeros(num_buffers, RECORD_BYTES, dtype=torch.uint8) if num_buffers else None
        self.worker = PrefetchWorker(
            self.region,
            bank=self.bank,
            slabs=self.slabs,
            engine=link.engine,
            staging=self.staging,
            piece_bytes=piece_bytes,
        )

    def emit(self, key: int, slot: int, *, deadline: int = FAR, tag: int | None = None) -> int:
        self._tag = self._tag + 1 if tag is None else tag
        tail = self.region.read(Word.TASK_TAIL)
        self._words[NUM_HEAD_WORDS + 4 * (tail % RING) :][:4] = key, slot, self._tag, deadline
        self.region.write(Word.TASK_TAIL, tail + 1)
        return self._tag

    def landings(self) -> list[tuple[int, int, int]]:
        """All of the last RING: (slot, tag, status)."""
        tail = self.region.read(Word.LANDING_TAIL)
        first = NUM_HEAD_WORDS + 4 * RING
        return [
            tuple(self._words[first + 5 * (i % RING) :][:3].tolist())
            for i in range(max(0, tail - RING), tail)
        ]

    def buffers(self, count: int) -> list[int]:
        """Staging buffers of the first `count` landings, all within one round of the ring."""
        first = NUM_HEAD_WORDS + 4 * RING
        return [int(self._words[first + 5 * i + 3]) for i in range(count)]

    def positions(self, count: int) -> list[int]:
        """What the first `count` landings say they took, all within one round of the ring."""
        first = NUM_HEAD_WORDS + 4 * RING
        return [int(self._words[first + 5 * i + 4]) for i in range(count)]

    def await_landings(self, count: int) -> None:
        wait_until(lambda: self.region.read(Word.LANDING_TAIL) >= count)


def wait_until(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds} s"
        time.sleep(1e-3)


@pytest.fixture
def make() -> Iterator[Callable[..., Device]]:
    devices: list[Device] = []

    def factory(*, num_buffers: int = 0, piece_bytes: int = RECORD_BYTES, **options: int) -> Device:
        devices.append(Device(FakeLink(**options), num_buffers, piece_bytes))
        return devices[-1]

    yield factory
    for device in devices:
        device.link.stick(False)
        device.worker.close()


def test_a_task_brings_its_record_and_reports_its_tag(make: Callable[..., Device]) -> None:
    device = make()
    tag = device.emit(key=7, slot=2)
    device.worker.drain()
    assert device.landings() == [(2, tag, Landed.ARRIVED)]
    assert torch.equal(device.slabs.slab(2), device.bank[7])
    device.worker.raise_if_failed()


def test_a_slow_link_reports_nothing_before_the_bytes_are_there(make: Callable[..., Device]) -> None:
    device = make(delay=3000, num_pieces=3)
    for i in range(RING):
        device.emit(key=i, slot=i)
    for i in range(1, RING + 1):
        device.await_landings(i)
        slot, _, status = device.landings()[i - 1]
        assert (slot, status) == (i - 1, Landed.ARRIVED)
        assert torch.equal(device.slabs.slab(slot), device.bank[i - 1])
    assert device.link.num_started == RING


def test_the_rings_go_round_many_times(make: Callable[..., Device]) -> None:
    device = make(delay=2)
    for i in range(10 * RING + 1):
        device.emit(key=i % NUM_KEYS, slot=i % NUM_SLOTS)
        device.await_landings(i + 1)
        assert torch.equal(device.slabs.slab(i % NUM_SLOTS), device.bank[i % NUM_KEYS])


def test_no_more_copies_are_under_way_than_events(make: Callable[..., Device]) -> None:
    device = make(num_pieces=2)
    device.link.stick(True)
    for i in range(RING):
        device.emit(key=i, slot=i)
    wait_until(lambda: device.link.num_started == 2)
    time.sleep(0.02)
    assert device.link.num_started == 2
    device.link.stick(False)
    device.worker.drain()


def test_a_task_whose_layer_has_begun_is_dropped_and_said_so(make: Callable[..., Device]) -> None:
    device = make()
    device.slabs.memory.fill_(0xA5)
    device.region.write(Word.POSITION, 5)
    stale, fresh = device.emit(key=1, slot=1, deadline=5), device.emit(key=2, slot=2, deadline=6)
    device.worker.drain()
    assert sorted(device.landings()) == [(1, stale, Landed.DROPPED), (2, fresh, Landed.ARRIVED)]
    assert device.slabs.slab(1).unique().tolist() == [0xA5]


def test_a_landing_says_how_far_the_layers_got_while_the_link_carried_it(
    make: Callable[..., Device],
) -> None:
    device = make()
    device.region.write(Word.POSITION, 5)
    device.link.stick(True)
    for i in range(3):
        device.emit(key=i, slot=i)
    wait_until(lambda: device.link.num_started == 2)
    device.region.write(Word.POSITION, 9)
    device.link.stick(False)
    device.worker.drain()
    device.region.write(Word.POSITION, 20)  # nothing is under way meanwhile
    device.emit(key=3, slot=3)
    device.worker.drain()
    assert device.positions(4) == [
        4,
        0,
        0,
        0,
    ]  # the second waited for the first: the link carried one at a time


def test_a_pause_holds_back_new_copies_only(make: Callable[..., Device]) -> None:
    device = make(delay=200)
    device.emit(key=1, slot=1)
    wait_until(lambda: device.link.num_started == 1)
    device.region.write(Word.PAUSE, 1)
    device.emit(key=2, slot=2)
    device.await_landings(1)
    time.sleep(0.02)
    assert device.link.num_started == 1
    device.region.write(Word.PAUSE, 0)
    device.worker.drain()
    assert device.link.num_started == 2


@pytest.mark.parametrize("num_buffers", [0, 3])
def test_a_record_in_pieces_lands_with_its_last(make: Callable[..., Device], num_buffers: int) -> None:
    device = make(piece_bytes=24, delay=50, num_buffers=num_buffers)  # 24, 24 and 16 of 64 bytes
    tags = [device.emit(key=key, slot=key) for key in range(3)]
    device.worker.drain()
    assert device.landings() == [(key, tag, Landed.ARRIVED) for key, tag in enumerate(tags)]
    assert device.link.num_started == 9
    memory = device.slabs.memory.view(NUM_SLOTS, -1) if device.staging is None else device.staging
    assert torch.equal(memory[:3, :RECORD_BYTES], device.bank[:3])


def test_a_pause_holds_back_the_pieces_to_come(make: Callable[..., Device]) -> None:
    device = make(piece_bytes=16, num_pieces=2)
    device.link.stick(True)
    device.emit(key=1, slot=1)
    wait_until(lambda: device.link.num_started == 2)
    device.region.write(Word.PAUSE, 1)
    device.link.stick(False)
    time.sleep(0.02)
    assert device.link.num_started == 2
    assert device.landings() == []
    device.region.write(Word.PAUSE, 0)
    device.worker.drain()
    assert device.link.num_started == 4
    assert torch.equal(device.slabs.slab(1), device.bank[1])


def test_a_pause_does_not_hold_back_what_the_running_layer_awaits(make: Callable[..., Device]) -> None:
    device = make(piece_bytes=16)
    device.link.stick(True)
    device.region.write(Word.POSITION, 4)
    tag = device.emit(key=1, slot=1, deadline=5)
    wait_until(lambda: device.link.num_started == 2)
    device.region.write(Word.PAUSE, 1)
    device.region.write(Word.POSITION, 5)
    device.link.stick(False)
    device.await_landings(1)
    assert device.landings() == [(1, tag, Landed.ARRIVED)]
    assert torch.equal(device.slabs.slab(1), device.bank[1])


def test_what_is_stale_is_said_so_in_a_pause_and_behind_an_open_copy(make: Callable[..., Device]) -> None:
    device = make(piece_bytes=16)
    device.link.stick(True)
    device.emit(key=1, slot=1)
    wait_until(lambda: device.link.num_started == 2)
    device.region.write(Word.PAUSE, 1)
    device.region.write(Word.POSITION, 5)
    stale = device.emit(key=2, slot=2, deadline=5)
    device.await_landings(1)
    assert device.landings() == [(2, stale, Landed.DROPPED)]
    device.region.write(Word.PAUSE, 0)
    device.link.stick(False)
    device.worker.drain()
    assert torch.equal(device.slabs.slab(1), device.bank[1])


def test_the_first_failure_of_the_link_is_raised_at_the_next_step(make: Callable[..., Device]) -> None:
    device = make(fail_at=1)
    device.emit(key=1, slot=1)
    device.worker.drain()
    device.worker.raise_if_failed()
    device.emit(key=2, slot=2)
    with pytest.raises(RuntimeError, match=f"worker ended: the copy engine returned error {LINK_ERROR}"):
        device.worker.drain()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="copy engine returned error"):
            device.worker.raise_if_failed()
    assert device.region.read(Word.FAILURE) == LINK_ERROR
    assert [status for _, _, status in device.landings()] == [Landed.ARRIVED]


@pytest.mark.parametrize(
    "task",
    [
        {"key": NUM_KEYS, "slot": 0},
        {"key": 0, "slot": NUM_SLOTS},
        {"key": -1, "slot": 0},
        {"key": 0, "slot": 0, "tag": 0},
    ],
    ids=["key", "slot", "negative", "old-tag"],
)
def test_a_broken_ring_ends_the_worker_before_it_writes(
    make: Callable[..., Device], task: dict[str, int]
) -> None:
    device = make()
    device.emit(**task)
    with pytest.raises(RuntimeError, match="was not written by the device"):
        device.worker.drain()
    assert device.link.num_started == 0


def test_a_link_that_hangs_times_out(make: Callable[..., Device]) -> None:
    device = make()
    device.link.stick(True)
    device.emit(key=1, slot=1)
    with pytest.raises(TimeoutError, match="0 of 1 prefetch tasks are done"):
        device.worker.drain(timeout_s=0.05)
    device.worker.raise_if_failed()  # slow is not failed


def test_a_killed_worker_is_noticed(make: Callable[..., Device]) -> None:
    device = make()
    device.region.write(Word.STOP, 1)
    wait_until(lambda: not device.worker.is_alive)
    with pytest.raises(RuntimeError, match="ended: it was told to stop"):
        device.worker.raise_if_failed()


def test_close_waits_for_copies_under_way_and_can_be_called_again(make: Callable[..., Device]) -> None:
    device = make(delay=20)
    device.emit(key=3, slot=0)
    wait_until(lambda: device.link.num_started == 1)
    device.worker.close()
    device.worker.close()
    assert torch.equal(device.slabs.slab(0), device.bank[3])
    device.worker.raise_if_failed()


@pytest.mark.slow
def test_a_stuck_copy_is_not_hidden_by_the_failure_of_another() -> None:
    device = Device(FakeLink(fail_at=1))
    device.link.stick(True)
    for key in range(2):
        device.emit(key, slot=key)
    device.worker._thread.join(20)  # the loop waits for the first copy as long as it ever does
    with pytest.raises(TimeoutError, match="still under way"):
        device.worker.close()


def test_the_heart_beats_while_nothing_is_to_do(make: Callable[..., Device]) -> None:
    device = make()
    before = device.region.read(Word.HEARTBEAT)
    wait_until(lambda: device.region.read(Word.HEARTBEAT) > before + 10)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="threads are bound on Linux alone")
def test_its_thread_keeps_to_the_processors_it_is_given() -> None:
    before = os.sched_getaffinity(0)
    bank, slabs = torch.zeros(4, 64, dtype=torch.uint8), SlabPool(2, 64, torch.device("cpu"))
    region = ControlRegion(torch.device("cpu"), ring_size=RING)
    worker = PrefetchWorker(
        region, bank=bank, slabs=slabs, engine=FakeLink().engine, cpus=frozenset([max(before)])
    )
    wait_until(lambda: region.read(Word.HEARTBEAT) > 0)
    thread = worker._thread.native_id
    assert thread is not None
    assert os.sched_getaffinity(thread) == {max(before)}
    worker.close()
    assert os.sched_getaffinity(0) == before


def test_a_new_worker_goes_on_where_the_old_one_was_closed(make: Callable[..., Device]) -> None:
    device = make()
    device.emit(key=1, slot=1)
    device.worker.drain()
    device.worker.close()
    device.region.restart(1)
    link = FakeLink()
    device.worker = PrefetchWorker(device.region, bank=device.bank, slabs=device.slabs, engine=link.engine)
    device.emit(key=2, slot=2)
    device.worker.drain()
    assert link.num_started == 1
    assert torch.equal(device.slabs.slab(2), device.bank[2])


def test_packed_records_land_in_staging_which_is_used_again_once_it_is_consumed(
    make: Callable[..., Device],
) -> None:
    device = make(num_buffers=3)
    tags = [device.emit(key, slot=key % NUM_SLOTS) for key in range(RING)]
    device.await_landings(3)
    time.sleep(0.05)
    assert [landing[1] for landing in device.landings()] == tags[:3]  # the fourth has no place
    assert device.link.num_started == 3
    assert device.staging is not None
    for key, buffer in enumerate(device.buffers(3)):
        assert torch.equal(device.staging[buffer], device.bank[key])
    assert bool((device.slabs.memory == 0xA5).all())
    device.region.write(Word.CONSUMED, 1)
    device.await_landings(4)
    assert device.buffers(4)[3] == device.buffers(4)[0]
    assert torch.equal(device.staging[device.buffers(4)[3]], device.bank[3])


def test_staging_must_fit(make: Callable[..., Device]) -> None:
    link = FakeLink()
    bank, slabs = torch.zeros(4, 48, dtype=torch.uint8), SlabPool(2, 64, torch.device("cpu"))
    region = ControlRegion(torch.device("cpu"), ring_size=RING)
    with pytest.raises(ValueError, match="records of 48 bytes for slabs of 64: packed ones need staging"):
        PrefetchWorker(region, bank=bank, slabs=slabs, engine=link.engine)
    for shape in ((3, 64), (2, 48)):
        with pytest.raises(ValueError, match=r"staging .* for records of 48 bytes and 2 pieces under way"):
            PrefetchWorker(
                region,
                bank=bank,
                slabs=slabs,
                engine=link.engine,
                staging=torch.zeros(*shape, dtype=torch.uint8),
            )


@pytest.mark.parametrize("ring_size", [0, 3, 100])
def test_a_ring_is_a_power_of_two(ring_size: int) -> None:
    with pytest.raises(ValueError, match="power of two"):
        ControlRegion(torch.device("cpu"), ring_size=ring_size)


@pytest.mark.gpu
def test_cuda_copies_bring_the_bytes() -> None:
    from hetero_gpu.control import CopyEngine

    device = torch.device("cuda")
    num_bytes = (2 << 20) + 16  # three pieces
    bank = torch.randint(0, 256, (NUM_KEYS, num_bytes), dtype=torch.uint8).pin_memory()
    slabs, region = SlabPool(NUM_SLOTS, num_bytes, device), ControlRegion(device, ring_size=RING)
    worker = PrefetchWorker(region, bank=bank, slabs=slabs, engine=CopyEngine.cuda(device))
    try:
        for i in range(NUM_KEYS):
            region._view[NUM_HEAD_WORDS + 4 * (i % RING) :][:4] = i, i % NUM_SLOTS, i + 1, FAR
            region.write(Word.TASK_TAIL, i + 1)
            worker.drain()
            assert torch.equal(slabs.slab(i % NUM_SLOTS).cpu(), bank[i])
    finally:
        worker.close()


def test_numpy_sees_the_layout_that_the_docstring_draws() -> None:
    region = ControlRegion(torch.device("cpu"), ring_size=RING)
    assert region.tasks_address - region.device_address == 8 * NUM_HEAD_WORDS
    assert region.landings_address - region.tasks_address == 8 * 4 * RING
    assert region._view.size == NUM_HEAD_WORDS + 9 * RING
    assert np.count_nonzero(region._view) == 0
