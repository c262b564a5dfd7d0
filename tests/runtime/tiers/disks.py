"""Sources of records that fail, stop and remember, as a test wants."""

from __future__ import annotations

import threading
from collections import Counter

from hetero_runtime.tiers.base import Bytes, StoredRecord
from hetero_scheduler import ExpertKey

NUM_EXPERTS = 8
RECORD = 4096


def bytes_of(key: ExpertKey) -> int:
    """The byte that fills the record of `key`."""
    return key.layer * NUM_EXPERTS + key.expert + 1


def record(layer: int, expert: int) -> StoredRecord:
    return StoredRecord(ExpertKey(layer, expert), RECORD)


class FakeDisk:
    """Reads at once, unless `stop` was called; then `go_on` lets so many reads end."""

    def __init__(self) -> None:
        self.order: list[ExpertKey] = []
        """Keys in the order in which reads began."""
        self.faults: dict[ExpertKey, list[Exception]] = {}
        """What the next reads of a key raise, one each."""
        self.is_closed = False
        self._gate: threading.Semaphore | None = None
        self._began = threading.Condition()

    def stop(self) -> None:
        self._gate = threading.Semaphore(0)

    def go_on(self, num_reads: int = 1000) -> None:
        assert self._gate is not None
        self._gate.release(num_reads)

    def await_begun(self, num_reads: int) -> None:
        """Block until so many reads have begun, all told."""
        with self._began:
            assert self._began.wait_for(lambda: len(self.order) >= num_reads, timeout=10)

    def counts(self) -> Counter[ExpertKey]:
        return Counter(self.order)

    def read(self, key: ExpertKey, into: Bytes) -> None:
        with self._began:
            self.order.append(key)
            self._began.notify_all()
        into[: RECORD // 2] = 0xEE  # half of a read that may fail
        if self._gate is not None:
            assert self._gate.acquire(timeout=10)
        if self.faults.get(key):
            raise self.faults[key].pop(0)
        into.fill(bytes_of(key))

    def close(self) -> None:
        self.is_closed = True
