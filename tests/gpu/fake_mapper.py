"""Mapped memory without a GPU: pages whose alias is a tensor of the host."""

from __future__ import annotations

import ctypes
import mmap

import torch


class FakeMapper:
    """Remembers what is allocated. `refuses`: there is no memory."""

    def __init__(self, *, refuses: bool = False) -> None:
        self.allocated: dict[int, mmap.mmap] = {}
        """By address; what was freed is not here any more."""
        self.num_freed = 0
        self._freed: list[mmap.mmap] = []  # kept, so that a late write shows in a test and ends no process
        self._refuses = refuses

    def allocate(self, num_bytes: int) -> int:
        if self._refuses:
            raise MemoryError("the driver maps no more")
        pages = mmap.mmap(-1, num_bytes)
        address = ctypes.addressof(ctypes.c_uint8.from_buffer(pages))
        self.allocated[address] = pages
        return address

    def alias(self, address: int, num_bytes: int) -> torch.Tensor:
        assert len(self.allocated[address]) == num_bytes
        return torch.frombuffer(self.allocated[address], dtype=torch.uint8)

    def free(self, address: int) -> None:
        self._freed.append(self.allocated.pop(address))
        self.num_freed += 1
