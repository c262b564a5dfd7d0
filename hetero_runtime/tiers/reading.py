"""Reads of records into slabs of host memory, by a few threads, while computation goes on.

    engine    ─ load 3 ─ load 8 ─ fetch ahead 5, 6 ─ wait 3 ─ expert 3 ─ wait 8 ─ expert 8 ─ …
    thread    ─── 3 ──────────────────────────── 5 ────── 6 ── …      awaited reads first, then those ahead
    thread    ───────── 8 ──────────────────── …

A disk shares its rate among reads, and each one ahead may be in vain: so reads ahead begin while nobody waits
for another, a few at a time, and a layer that then asks waits for little besides its own.

A read that nobody waits for any more is taken off while it waits for a thread; one under way is read to its
end, and only then does the next into the same slab begin: a slab never gets bytes from two reads at once.
Where a device computes from the slabs themselves, a read also waits, on its thread, until the device has read
what the slab held. A read that fails is tried again; when it keeps failing, whoever waits for it gets a
RequestError, and the threads go on with the next.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from enum import Enum
from typing import NamedTuple, Protocol, cast

import torch

from hetero_gpu import Copier, Fence, Transfer
from hetero_runtime.errors import CheckpointError, RequestError
from hetero_runtime.tiers.base import RecordSource, StoredRecord
from hetero_scheduler import ExpertKey

RETRY_PAUSES_S = (0.01, 0.1, 0.5)
"""Before the second, third and fourth try."""
AHEAD_AT_ONCE = 2
"""Reads ahead under way together: a layer that asks meanwhile shares the disk with no more."""
SMOOTHING = 0.1
"""Weight of the newest read in the moving average of their time."""


class ReadStats(NamedTuple):
    """What was read since the start; `retries` and `failures` count reads of whole records. `busy_s`: seconds
    in which at least one read was under way. `spared`: records for a device that host memory had."""

    reads: int = 0
    num_bytes: int = 0
    retries: int = 0
    failures: int = 0
    busy_s: float = 0.0
    spared: int = 0


class _State(Enum):
    """WAITING → READING → DONE | FAILED; WAITING → GIVEN_UP. Changed by the copier alone, under its guard."""

    WAITING = "waiting"
    READING = "reading"
    DONE = "done"
    FAILED = "failed"
    GIVEN_UP = "given up"


class RecordRead(Transfer):
    """One read. `before`: the last one into the same slab, over before this one begins. `after`: what the
    device must have passed by then."""

    def __init__(
        self,
        owner: ReadingCopier,
        record: StoredRecord,
        slab: torch.Tensor,
        *,
        before: RecordRead | None,
        after: SlabFence | None,
    ) -> None:
        self.record, self.slab, self.before, self.after = record, slab, before, after
        self.state, self.is_awaited = _State.WAITING, False
        self.error: Exception | None = None
        self.sequels: list[Callable[[], None]] = []
        self._owner = owner

    @property
    def is_of_disk(self) -> bool:
        """Whether it takes time of the disk."""
        return self.record.nbytes > 0

    def is_done(self) -> bool:
        return self.state is _State.DONE

    def is_over(self) -> bool:
        return self.state not in (_State.WAITING, _State.READING)

    def wait(self) -> None:
        self._owner.wait_for(self)

    def hurry(self) -> None:
        self._owner.put_first(self)

    def give_up(self) -> None:
        self._owner.take_off(self)


class SlabFence(Protocol):
    """A point in what a device was told to do with slabs of host memory."""

    def synchronize(self) -> None:
        """Block until the device has passed it."""


class ReadingCopier(Copier[StoredRecord]):
    """See the module docstring. `num_threads`: reads at once. Slabs are host memory; `fence`: makes the point
    that a device has reached which computes from them; None where the host does, and is through."""

    overlaps, is_spare, keeps_order = True, False, False

    def __init__(
        self, source: RecordSource, *, num_threads: int, fence: Callable[[], SlabFence] | None = None
    ) -> None:
        self._source, self._fence = source, fence
        self._guard = threading.Condition()
        self._awaited: deque[RecordRead] = deque()
        self._ahead: deque[RecordRead] = deque()
        self._last_into: dict[int, RecordRead] = {}
        self._reading: set[RecordRead] = set()
        self._closing = threading.Event()
        self._meter = _Meter()
        self._stats, self._busy_since_s = ReadStats(), 0.0
        self._stall_s = 0.0
        self._threads = [
            threading.Thread(target=self._work, name=f"expert-disk-{i}", daemon=True)
            for i in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, source: StoredRecord, slab: torch.Tensor, *, after: Fence | None) -> Transfer:
        assert after is None or self._fence is not None, "the host is through with what it computed"
        return self.read(source, slab, after=cast(SlabFence | None, after))

    def read(self, record: StoredRecord, slab: torch.Tensor, *, after: SlabFence | None = None) -> RecordRead:
        """`submit`, for who wants to know when it is over."""
        assert not self._closing.is_set(), f"a read of {record.key} after the end"
        with self._guard:
            before = self._last_into.get(slab.data_ptr())
            read = RecordRead(self, record, slab, before=before, after=after)
            self._last_into[slab.data_ptr()] = read
            self._ahead.append(read)
            self._guard.notify_all()
        return read

    def fence(self) -> Fence | None:
        return None if self._fence is None else self._fence()

    def stall_s(self) -> float:
        return self._stall_s

    def copy_s(self, key: ExpertKey) -> float | None:
        """Seconds that one read takes of the disk's time now, whoever's it is; None before the first."""
        return self._meter.read_s

    def stats(self) -> ReadStats:
        """What was read so far."""
        with self._guard:
            return self._stats

    def synchronize(self) -> None:
        with self._guard:
            self._guard.wait_for(lambda: not (self._awaited or self._ahead or self._reading))

    def close(self) -> None:
        """Take off what waits, read to its end what is under way, end the threads. The source stays open."""
        with self._guard:
            for read in (*self._awaited, *self._ahead):
                self._end(read, _State.GIVEN_UP)
            self._awaited.clear()
            self._ahead.clear()
            self._closing.set()
            self._guard.notify_all()
        for thread in self._threads:
            thread.join()

    # ---- for the reads

    def wait_for(self, read: RecordRead) -> None:
        """Block until `read` is over. Raises RequestError when the record cannot be read."""
        began = time.perf_counter()
        self.put_first(read)
        with self._guard:
            self._guard.wait_for(read.is_over)
        self._stall_s += time.perf_counter() - began
        if read.error is not None:
            raise _explain(read.record.key, read.error) from read.error
        assert read.is_done(), f"a read of {read.record.key} was given up and waited for"

    def put_first(self, read: RecordRead) -> None:
        """Somebody will wait for `read`."""
        with self._guard:
            read.is_awaited = True
            if read in self._ahead:
                self._ahead.remove(read)
                self._awaited.append(read)
                self._guard.notify_all()

    def take_off(self, read: RecordRead) -> None:
        """Nobody will wait for `read`."""
        with self._guard:
            for queue in (self._awaited, self._ahead):
                if read in queue:
                    queue.remove(read)
                    self._end(read, _State.GIVEN_UP)
                    self._guard.notify_all()

    def when_over(self, read: RecordRead, sequel: Callable[[], None]) -> None:
        """Call `sequel` once `read` is over: now, if it is; else on the thread that read. It takes no time
        and raises nothing."""
        with self._guard:
            if not read.is_over():
                read.sequels.append(sequel)
                return
        sequel()

    # ---- the threads

    def _work(self) -> None:
        while (read := self._take()) is not None:
            error, began_s = _await(read.after), time.monotonic()
            if error is None:
                error = self._bring(read)
            with self._guard:
                self._reading.remove(read)
                self._count(read, error, began_s, time.monotonic())
                read.error = error
                self._end(read, _State.DONE if error is None else _State.FAILED)
                sequels, read.sequels = read.sequels, []
                self._guard.notify_all()
            for sequel in sequels:
                sequel()

    def _take(self) -> RecordRead | None:
        """The next read for this thread, once there is one; None at the end."""
        with self._guard:
            while not self._closing.is_set():
                read = self._first_of(self._awaited)
                if read is None and self._may_read_ahead():
                    read = self._first_of(self._ahead)
                if read is not None:
                    if read.is_of_disk and not self._is_disk_busy():
                        self._busy_since_s = time.monotonic()
                    self._reading.add(read)
                    return read
                self._guard.wait()
            return None

    def _first_of(self, queue: deque[RecordRead]) -> RecordRead | None:
        """Take the first whose slab is free."""
        for read in queue:
            if read.before is None or read.before.is_over():
                queue.remove(read)
                read.before, read.state = None, _State.READING
                return read
        return None

    def _is_disk_busy(self) -> bool:
        return any(read.is_of_disk for read in self._reading)

    def _may_read_ahead(self) -> bool:
        is_awaited = self._awaited or any(read.is_awaited for read in self._reading)
        return not is_awaited and len(self._reading) < AHEAD_AT_ONCE

    def _bring(self, read: RecordRead) -> Exception | None:
        """Read, again if need be. Returns what was wrong at last."""
        for pause_s in (*RETRY_PAUSES_S, None):
            try:
                self._source.read(read.record.key, read.slab.numpy())
                return None
            except (OSError, CheckpointError) as error:
                if pause_s is None or self._closing.wait(pause_s):
                    return error
                with self._guard:
                    self._stats = self._stats._replace(retries=self._stats.retries + 1)
            except Exception as error:  # a fault of ours: whoever waits gets it, and the thread lives on
                return error
        raise AssertionError("the last try returns")

    def _count(self, read: RecordRead, error: Exception | None, began_s: float, ended_s: float) -> None:
        stats = self._stats
        if not read.is_of_disk:
            return
        if not self._is_disk_busy():
            stats = stats._replace(busy_s=stats.busy_s + ended_s - self._busy_since_s)
        if error is None:
            self._meter.ends(began_s, ended_s)
            stats = stats._replace(reads=stats.reads + 1, num_bytes=stats.num_bytes + read.record.nbytes)
        else:
            stats = stats._replace(failures=stats.failures + 1)
        self._stats = stats

    def _end(self, read: RecordRead, state: _State) -> None:
        """WAITING or READING no more; its slab is free for the next."""
        read.state, read.before = state, None
        if self._last_into.get(read.slab.data_ptr()) is read:
            del self._last_into[read.slab.data_ptr()]


class _Meter:
    """Time that one read takes of the disk: from the end of the one before, or its own begin if later."""

    def __init__(self) -> None:
        self.read_s: float | None = None
        self._last_end_s = 0.0

    def ends(self, began_s: float, ended_s: float) -> None:
        taken = ended_s - max(began_s, self._last_end_s)
        before = taken if self.read_s is None else self.read_s
        self.read_s, self._last_end_s = before + SMOOTHING * (taken - before), ended_s


def _await(fence: SlabFence | None) -> Exception | None:
    """Block until the device has read what the slab held. Returns what is wrong with the device."""
    try:
        if fence is not None:
            fence.synchronize()
    except Exception as error:
        return error
    return None


def _explain(key: ExpertKey, error: Exception) -> Exception:
    """What the one who waits for `key` gets."""
    if not isinstance(error, (OSError, CheckpointError)):
        return error
    return RequestError(
        f"expert {key.expert} of MoE layer {key.layer} cannot be read after {1 + len(RETRY_PAUSES_S)} tries: "
        f"{error}. The engine goes on with other requests"
    )
