"""Records that leave a device go back to host memory, where a disk would have to be asked again.

    device    slab 7: expert 3 ──► pinned buffer      before the copy of expert 8 to slab 7 begins
    a thread                       pinned buffer ──► host slab

So host memory need not keep what the device has, and both together hold as many different experts as they
have slabs. For host memory this is a read like any other, of a source that asks no disk; what finds no buffer
is lost, as if it had never come back.
"""

from __future__ import annotations

import threading
from typing import NamedTuple

import numpy as np
import torch

from hetero_gpu import LinkCopier, Point, Transfer
from hetero_runtime.tiers.base import Bytes, RecordSource
from hetero_scheduler import ExpertKey


class _Returned(NamedTuple):
    """A record in `buffer` once `there` is passed."""

    buffer: torch.Tensor
    there: Point


class ReturningRecords:
    """A RecordSource: records that came back from a device, all others from `records`.

    `buffers`: uint8 `[num_buffers, record_bytes]`, host memory that `link` copies to; pinned for CUDA's.
    """

    def __init__(self, records: RecordSource, link: LinkCopier, buffers: torch.Tensor) -> None:
        self._records, self._link = records, link
        self._free = list(buffers)
        self._returned: dict[ExpertKey, _Returned] = {}
        self._guard = threading.Lock()

    def bring_back(self, key: ExpertKey, slab: torch.Tensor, *, copied: Transfer) -> bool:
        """Begin to bring `key` back, which `copied` brought to `slab`. False when no buffer is free."""
        with self._guard:
            if not self._free:
                return False
            there = self._link.bring_back(slab, self._free[-1], copied=copied)
            self._returned[key] = _Returned(self._free.pop(), there)
        return True

    def has(self, key: ExpertKey) -> bool:
        """Whether `key` came back and was not read yet: it takes nothing of the disk's time."""
        return key in self._returned

    def read(self, key: ExpertKey, into: Bytes) -> None:
        """See RecordSource; from a buffer it cannot fail, but for the device."""
        returned = self._returned.get(key)
        if returned is None:
            self._records.read(key, into)
            return
        returned.there.synchronize()
        np.copyto(into, returned.buffer.numpy())
        self.forget(key)

    def forget(self, key: ExpertKey) -> None:
        """Nobody will read what came back of `key`, if anything did."""
        with self._guard:
            returned = self._returned.pop(key, None)
            if returned is not None:
                self._free.append(returned.buffer)

    def close(self) -> None:
        """See RecordSource."""
        self._records.close()
