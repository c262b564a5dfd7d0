"""Reader threads: what goes first, what fails, and that a slab gets bytes from one read at a time."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from hetero_runtime.errors import CheckpointError, RequestError
from hetero_runtime.tiers import reading
from hetero_runtime.tiers.reading import ReadingCopier
from tests.runtime.engine.rest import engine_threads
from tests.runtime.tiers.disks import RECORD, FakeDisk, bytes_of, record


@pytest.fixture
def disk() -> FakeDisk:
    return FakeDisk()


@pytest.fixture
def copier(disk: FakeDisk) -> Iterator[ReadingCopier]:
    """One thread, so that the order of reads is the order of choice."""
    copier = ReadingCopier(disk, num_threads=1)
    yield copier
    disk.stop()
    disk.go_on()
    copier.close()
    assert engine_threads() == []


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "RETRY_PAUSES_S", (0.0, 0.0, 0.0))


def slabs(num: int) -> torch.Tensor:
    return torch.zeros((num, RECORD), dtype=torch.uint8)


def assert_holds(slab: torch.Tensor, layer: int, expert: int) -> None:
    assert slab.unique().tolist() == [bytes_of(record(layer, expert).key)]


def test_awaited_reads_go_first_and_the_others_keep_their_order(
    disk: FakeDisk, copier: ReadingCopier
) -> None:
    disk.stop()
    memory = slabs(4)
    reads = [copier.read(record(0, i), memory[i]) for i in range(4)]
    disk.await_begun(1)  # 0 is under way
    reads[3].hurry()
    disk.go_on()
    reads[2].wait()
    copier.synchronize()
    assert disk.order[0].expert == 0
    assert {key.expert for key in disk.order[1:3]} <= {3, 2, 1}
    assert disk.order.index(record(0, 3).key) < disk.order.index(record(0, 1).key)
    for i, read in enumerate(reads):
        assert read.is_done()
        assert_holds(memory[i], 0, i)
    assert copier.stall_s() > 0


def test_reads_ahead_begin_while_nobody_waits_for_another(disk: FakeDisk) -> None:
    copier = ReadingCopier(disk, num_threads=4)
    disk.stop()
    memory = slabs(5)
    wanted = copier.read(record(0, 0), memory[0])
    wanted.hurry()
    disk.await_begun(1)
    ahead = [copier.read(record(1, i), memory[i]) for i in range(1, 5)]
    late = copier.read(record(0, 7), torch.zeros(RECORD, dtype=torch.uint8))
    late.hurry()
    disk.await_begun(2)
    assert disk.order == [record(0, 0).key, record(0, 7).key]  # threads are free, and reads ahead wait
    disk.go_on(2)
    wanted.wait()
    late.wait()
    disk.await_begun(4)
    assert sum(not read.is_over() for read in ahead) == 4
    assert len(disk.order) == 2 + reading.AHEAD_AT_ONCE
    disk.go_on()
    copier.synchronize()
    copier.close()


def test_a_read_that_nobody_wants_is_taken_off_unless_it_has_begun(
    disk: FakeDisk, copier: ReadingCopier
) -> None:
    disk.stop()
    memory = slabs(2)
    first, second = (copier.read(record(0, i), memory[i]) for i in range(2))
    disk.await_begun(1)
    first.give_up()
    second.give_up()
    assert second.is_over()
    assert not second.is_done()
    assert not first.is_over()
    disk.go_on()
    copier.synchronize()
    assert first.is_done()
    assert disk.order == [record(0, 0).key]
    assert copier.stats()[:4] == (1, RECORD, 0, 0)


def test_two_reads_into_one_slab_never_overlap(disk: FakeDisk) -> None:
    copier = ReadingCopier(disk, num_threads=4)
    disk.stop()
    memory = slabs(2)
    old = copier.read(record(0, 0), memory[0])
    disk.await_begun(1)
    old.give_up()  # too late: its thread is in the middle of it
    new, other = copier.read(record(0, 1), memory[0]), copier.read(record(0, 2), memory[1])
    disk.await_begun(2)
    assert disk.order[1] == record(0, 2).key  # a thread is free, the slab is not
    disk.go_on()
    new.wait()
    other.wait()
    assert_holds(memory[0], 0, 1)
    copier.close()


@pytest.mark.parametrize(
    "fault", [OSError(5, "Input/output error"), CheckpointError("record 0 is not what was packed")]
)
def test_a_failing_read_is_tried_again(disk: FakeDisk, copier: ReadingCopier, fault: Exception) -> None:
    memory, wanted = slabs(1), record(0, 0)
    disk.faults[wanted.key] = [fault] * 3
    copier.read(wanted, memory[0]).wait()
    assert_holds(memory[0], 0, 0)
    assert copier.stats()[:4] == (1, RECORD, 3, 0)


def test_a_read_that_keeps_failing_fails_whoever_waits_for_it(disk: FakeDisk, copier: ReadingCopier) -> None:
    memory, wanted = slabs(2), record(1, 4)
    disk.faults[wanted.key] = [OSError(5, "Input/output error")] * 4
    read = copier.read(wanted, memory[0])
    with pytest.raises(RequestError, match=r"expert 4 of MoE layer 1 .*4 tries: .*Input/output error"):
        read.wait()
    assert read.is_over()
    assert not read.is_done()
    copier.read(record(0, 1), memory[1]).wait()  # the thread lives
    assert copier.stats()[:4] == (1, RECORD, 3, 1)
    copier.read(wanted, memory[0]).wait()  # and so does the record
    assert_holds(memory[0], 1, 4)


def test_a_fault_of_ours_is_not_tried_again(disk: FakeDisk, copier: ReadingCopier) -> None:
    disk.faults[record(0, 0).key] = [ValueError("wrong shape")]
    with pytest.raises(ValueError, match="wrong shape"):
        copier.read(record(0, 0), slabs(1)[0]).wait()
    assert copier.stats().retries == 0


def test_a_sequel_follows_its_read_or_comes_at_once(disk: FakeDisk, copier: ReadingCopier) -> None:
    disk.stop()
    read = copier.read(record(0, 0), slabs(1)[0])
    heard: list[bool] = []
    copier.when_over(read, lambda: heard.append(read.is_done()))
    assert heard == []
    disk.go_on()
    copier.synchronize()
    copier.close()
    copier.when_over(read, lambda: heard.append(read.is_done()))
    assert heard == [True, True]


def test_the_time_of_a_read_is_that_of_the_disk(disk: FakeDisk, copier: ReadingCopier) -> None:
    key = record(0, 0).key
    assert copier.copy_s(key) is None
    copier.read(record(0, 0), slabs(1)[0]).wait()
    assert (copier.copy_s(key) or 0) > 0
    assert 0 < copier.stats().busy_s < 10
    meter = reading._Meter()
    meter.ends(1.0, 3.0)
    assert meter.read_s == 2.0
    meter.ends(1.0, 3.5)  # began with the one before, ended half a second later
    assert meter.read_s == pytest.approx(2.0 + reading.SMOOTHING * (0.5 - 2.0))


def test_closing_takes_off_what_waits(disk: FakeDisk) -> None:
    copier = ReadingCopier(disk, num_threads=1)
    disk.stop()
    memory = slabs(2)
    first, second = (copier.read(record(0, i), memory[i]) for i in range(2))
    disk.await_begun(1)
    disk.go_on()
    copier.close()
    assert first.is_over()
    assert second.is_over()
    assert engine_threads() == []


class FakeFence:
    """A device that passes when it is told to."""

    def __init__(self) -> None:
        self.is_awaited, self._passed = threading.Event(), threading.Event()

    def synchronize(self) -> None:
        self.is_awaited.set()
        assert self._passed.wait(10)

    def pass_(self) -> None:
        self._passed.set()


def test_a_slab_that_the_device_still_reads_is_written_later(disk: FakeDisk) -> None:
    fence = FakeFence()
    copier = ReadingCopier(disk, num_threads=2, fence=lambda: fence)
    memory = slabs(2)
    assert copier.fence() is fence
    held = copier.submit(record(0, 1), memory[0], after=copier.fence())
    free = copier.submit(record(0, 2), memory[1], after=None)
    free.wait()
    assert fence.is_awaited.wait(10)
    assert not memory[0].any()
    assert not held.is_done()
    fence.pass_()
    held.wait()
    assert_holds(memory[0], 0, 1)
    copier.close()


def test_a_device_that_fails_fails_who_waits_and_no_thread(disk: FakeDisk) -> None:
    class Broken:
        def synchronize(self) -> None:
            raise RuntimeError("the device is lost")

    copier = ReadingCopier(disk, num_threads=1, fence=Broken)
    memory = slabs(2)
    lost = copier.submit(record(0, 1), memory[0], after=copier.fence())
    with pytest.raises(RuntimeError, match="the device is lost"):
        lost.wait()
    copier.submit(record(0, 2), memory[1], after=None).wait()
    assert_holds(memory[1], 0, 2)
    copier.close()
