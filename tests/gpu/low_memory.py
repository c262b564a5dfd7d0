"""Memory at an address that fits into 32 bits, where an interpreter that is not position-independent has its
heap, as Debian's is: Triton takes such an address for a 32-bit number."""

from __future__ import annotations

import mmap
import platform

import pytest
import torch

_MAP_32BIT = 0x40


def low_memory(num_bytes: int) -> torch.Tensor:
    """Zeros, uint8 `[num_bytes]`, below 2 GiB; skips the test where the system has no such request."""
    if platform.machine() != "x86_64":
        pytest.skip("memory below 2 GiB can be asked for on x86-64 alone")
    mapped = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_32BIT)
    memory = torch.frombuffer(mapped, dtype=torch.uint8)
    assert memory.data_ptr() + num_bytes < 1 << 31
    return memory
