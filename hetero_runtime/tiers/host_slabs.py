"""Slabs of host memory that can be given back one by one."""

from __future__ import annotations

import torch

from hetero_gpu import SlabPool
from hetero_runtime.experts.bank import HostBank


class HostSlabs(SlabPool):
    """Page-aligned, in small pages, never locked: a direct read can fill a slab, and the system can have it
    back alone."""

    def __init__(self, num_slabs: int, record_bytes: int) -> None:
        """Reserve them. Raises DeviceError when the kernel refuses that much address space."""
        self._bank = HostBank(num_slabs * record_bytes, has_huge_pages=False)
        memory = self._bank.bytes.view(num_slabs, record_bytes)
        super().__init__(num_slabs, record_bytes, torch.device("cpu"), memory=memory)

    def discard(self, slot: int) -> None:
        """Give a slab's memory back, at once. It reads as zeros, and comes back when it is written."""
        self._bank.discard(slot * self.record_bytes, self.record_bytes)

    def close(self) -> None:
        super().close()
        self._bank.close()
