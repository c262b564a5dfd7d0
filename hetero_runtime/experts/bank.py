"""The host bank: one anonymous mapping that holds every record.

Reserving it costs nothing; pages come into being, two megabytes at a time where the kernel allows it, as
the reads fill them. Filling first and registering with CUDA afterwards is about ten times faster than
allocating pinned memory, and wastes no rounding to powers of two.
"""

from __future__ import annotations

import errno
import mmap
from typing import TYPE_CHECKING, Protocol

import torch

from hetero_runtime.errors import DeviceError

if TYPE_CHECKING:
    from hetero_gpu.host_memory import Registration

HUGE_PAGE_BYTES = 2 << 20


class Bank(Protocol):
    """What loading fills."""

    @property
    def bytes(self) -> torch.Tensor:
        """All of it, uint8 `[num_bytes]`, without a copy."""


class HostBank:
    """`num_bytes` of host memory, addressed as one uint8 tensor; registered with CUDA on request."""

    def __init__(self, num_bytes: int, *, has_huge_pages: bool = True) -> None:
        """Reserve the bank. Raises DeviceError when the kernel refuses that much address space.

        `has_huge_pages`: False for memory that the system swaps, or gets back, a record at a time.
        """
        assert num_bytes > 0, f"a bank of {num_bytes} bytes"
        self.num_bytes = num_bytes
        self.registration: Registration | None = None
        try:
            mapping = mmap.mmap(-1, num_bytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise DeviceError(
                f"the host refused {num_bytes / 1e9:.1f} GB for the experts ({error.strerror}); free memory, "
                f"or raise the limit of the process (ulimit -v, vm.overcommit_memory)"
            ) from error
        if hasattr(mmap, "MADV_HUGEPAGE"):
            _advise(mapping, mmap.MADV_HUGEPAGE if has_huge_pages else mmap.MADV_NOHUGEPAGE)
        self._mapping = mapping
        whole = torch.frombuffer(mapping, dtype=torch.uint8)
        self._start = -whole.data_ptr() % HUGE_PAGE_BYTES
        self._bytes: torch.Tensor | None = whole[self._start : self._start + num_bytes]

    @property
    def bytes(self) -> torch.Tensor:
        """The bank, uint8 `[num_bytes]`, without a copy."""
        assert self._bytes is not None, "the bank is closed"
        return self._bytes

    def shrink(self, num_bytes: int) -> None:
        """Keep the first `num_bytes` and give the rest back to the system, at once; before `register`."""
        assert self.registration is None, "CUDA holds the pages of a registered bank"
        assert 0 < num_bytes <= self.num_bytes, f"{num_bytes} of {self.num_bytes} bytes"
        first = self._start + -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        rest = self._start + self.num_bytes - first
        if rest > 0:
            self._mapping.madvise(mmap.MADV_DONTNEED, first, rest)
        self.num_bytes, self._bytes = num_bytes, self.bytes[:num_bytes]

    def will_need(self, begin: int, num_bytes: int) -> None:
        """Tell the kernel that these bytes, whole pages, are read next: what was swapped out comes back."""
        self._mapping.madvise(mmap.MADV_WILLNEED, self._start + begin, num_bytes)

    def discard(self, begin: int, num_bytes: int) -> None:
        """Give whole pages back to the system, at once; they read as zeros until they are written again."""
        assert self.registration is None, "CUDA holds the pages of a registered bank"
        assert begin % mmap.PAGESIZE == num_bytes % mmap.PAGESIZE == 0, f"{num_bytes} bytes at {begin}"
        self._mapping.madvise(mmap.MADV_DONTNEED, self._start + begin, num_bytes)

    def register(self, *, chunk_bytes: int) -> Registration:
        """Register the filled bank with CUDA, `chunk_bytes` (a multiple of a record) at a time."""
        from hetero_gpu.host_memory import register

        if self.registration is None:
            self.registration = register(self.bytes, chunk_bytes=chunk_bytes)
        return self.registration

    def close(self) -> None:
        """Unregister and give the memory back, at once; safe to call twice.

        The address range goes with the last view of it, so that a forgotten view reads zeros and does not
        crash.
        """
        if self.registration is not None:
            self.registration.release()
            self.registration = None
        if self._bytes is not None:
            self._mapping.madvise(mmap.MADV_DONTNEED)
            self._bytes = None


def _advise(mapping: mmap.mmap, advice: int) -> None:
    """Ask for huge pages, or for none. A kernel built without them says EINVAL: then all are small."""
    try:
        mapping.madvise(advice)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
