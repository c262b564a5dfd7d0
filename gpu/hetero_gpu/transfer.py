"""Copies of records into slabs, and how computation waits for them.

    transfer stream   ──[wait: last read of slab 7]──[copy → slab 7]──(done)──
    compute stream    ──[expert in slab 7]──(read)──── … ──[wait: done]──[new expert in slab 7]──

Two orders must hold. A copy into a slab starts after the last computation that reads what the slab held, and
a computation starts after the copy that it needs. Both are events between streams; the host waits for
neither. Copies of one `Copier` over a link finish in the order in which they were submitted, so a slab that
is given away while its copy is in flight ends up with the later bytes. Reads of a disk finish in any order
(`wait_all` and `num_on_the_way` of the slab cache are not for them), but those into one slab keep theirs.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import Generic, Protocol, TypeVar

import torch


class Record(Protocol):
    """One expert in the tier below: its bytes, or where they can be read."""

    @property
    def nbytes(self) -> int:
        """Bytes that a copy of it moves."""


R = TypeVar("R", bound=Record, contravariant=True)


class Transfer(ABC):
    """One copy, with its event."""

    @abstractmethod
    def is_done(self) -> bool:
        """Whether the bytes have arrived. Never blocks."""

    @abstractmethod
    def wait(self) -> None:
        """Make computation submitted from now on wait for this copy. Raises when its bytes cannot come: the
        slab then holds nothing."""

    def is_over(self) -> bool:
        """Whether it is done, or will never be. Never blocks."""
        return self.is_done()

    def hurry(self) -> None:  # noqa: B027 (copies that keep their order cannot)
        """Computation will wait for this one next: let it go first, where copies can choose."""

    def give_up(self) -> None:  # noqa: B027 (where copies keep their order, it does no harm)
        """Nobody waits for this one any more, and its slab may be given to another."""


class Fence(Protocol):
    """A point in the compute stream; a copy can be told to start after it."""


class Copier(ABC, Generic[R]):
    """Submits copies in order, on a stream of its own where the device has one.

    R: what a record is in the tier below. In host memory it is a tensor, uint8, as the bank has it.
    """

    @abstractmethod
    def submit(self, source: R, slab: torch.Tensor, *, after: Fence | None) -> Transfer:
        """Bring the record `source` into `slab` (uint8 `[record_bytes]`) once `after` has passed."""

    @abstractmethod
    def fence(self) -> Fence | None:
        """The point that the compute stream has reached in submission order. None if none is needed."""

    @abstractmethod
    def stall_s(self) -> float:
        """Seconds that computation has waited for copies so far."""

    @abstractmethod
    def synchronize(self) -> None:
        """Block the host until every submitted copy has arrived."""

    def close(self) -> None:
        """Wait for every copy, then give device memory back. Nothing is submitted after that."""
        self.synchronize()


class Point(Protocol):
    """Something that a device does."""

    def synchronize(self) -> None:
        """Block the host until it is done."""


class LinkCopier(Copier[torch.Tensor]):
    """Copies between host memory and slabs, both ways."""

    @abstractmethod
    def bring_back(self, slab: torch.Tensor, into: torch.Tensor, *, copied: Transfer) -> Point:
        """Bring to `into` (host memory, pinned for CUDA) what `copied` brought to `slab`, and nothing has
        overwritten. Copies that are submitted later overwrite it later."""


class Arrived(Transfer):
    """A record that is where it belongs."""

    def is_done(self) -> bool:
        return True

    def wait(self) -> None:
        return

    def synchronize(self) -> None:
        """See Point."""


class HostCopier(LinkCopier):
    """Device `cpu`: a slab is ordinary memory, so the copy is done when `submit` returns."""

    def __init__(self) -> None:
        self._stall_s = 0.0

    def submit(self, source: torch.Tensor, slab: torch.Tensor, *, after: Fence | None) -> Transfer:
        began = time.perf_counter()
        slab.copy_(source)
        self._stall_s += time.perf_counter() - began
        return Arrived()

    def bring_back(self, slab: torch.Tensor, into: torch.Tensor, *, copied: Transfer) -> Point:
        into.copy_(slab)
        return Arrived()

    def fence(self) -> Fence | None:
        return None

    def stall_s(self) -> float:
        return self._stall_s

    def synchronize(self) -> None:
        return
