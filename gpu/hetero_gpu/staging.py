"""Copies from pageable memory by way of a few small pinned buffers.

pageable source  |piece 0|piece 1|piece 2|piece 3|...
                     │ host copies while the link copies the piece before
pinned buffers   |  0    |  1    |  2    |  3    |   each reused once the link has read it
                     │ link
device           |piece 0|piece 1|...
"""

from __future__ import annotations

from typing import Protocol

import torch


class Event(Protocol):
    """A point in a stream."""

    def synchronize(self) -> None:
        """Block until the stream has passed it."""


class Link(Protocol):
    """Pinned memory and asynchronous copies from it."""

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """A pinned buffer, uint8 `[num_bytes]`."""

    def copy(self, source: torch.Tensor, target: torch.Tensor, stream: torch.cuda.Stream | None) -> Event:
        """Enqueue a copy from pinned `source`; the event follows it."""


class CudaLink:
    """CUDA's."""

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """See Link."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def copy(self, source: torch.Tensor, target: torch.Tensor, stream: torch.cuda.Stream | None) -> Event:
        """See Link."""
        event: torch.cuda.Event = torch.cuda.Event()
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
            event.record()
        return event


class StagingRing:
    """`num_buffers` pinned buffers of `buffer_bytes`, used in turn. One thread at a time."""

    def __init__(self, *, buffer_bytes: int, num_buffers: int = 4, link: Link | None = None) -> None:
        assert min(buffer_bytes, num_buffers) > 0, f"a ring of {num_buffers} x {buffer_bytes} bytes"
        self._link = link or CudaLink()
        self._buffers = [self._link.allocate(buffer_bytes) for _ in range(num_buffers)]
        self._events: list[Event | None] = [None] * num_buffers
        self._buffer_bytes, self._next = buffer_bytes, 0

    def copy(self, source: torch.Tensor, target: torch.Tensor, stream: torch.cuda.Stream | None) -> Event:
        """Copy pageable `source` to `target` (uint8, the same length, not empty) on `stream`.

        Returns when the last piece is enqueued: `source` may then change. The event says when `target` is
        complete.
        """
        assert 0 < source.numel() == target.numel(), f"copy of {source.numel()} to {target.numel()} bytes"
        event: Event | None = None
        for begin in range(0, source.numel(), self._buffer_bytes):
            piece = slice(begin, min(begin + self._buffer_bytes, source.numel()))
            event = self._stage(source[piece], target[piece], stream)
        assert event is not None
        return event

    def synchronize(self) -> None:
        """Block until every copy so far is complete."""
        for event in self._events:
            if event is not None:
                event.synchronize()

    def _stage(self, source: torch.Tensor, target: torch.Tensor, stream: torch.cuda.Stream | None) -> Event:
        slot, self._next = self._next, (self._next + 1) % len(self._buffers)
        in_use = self._events[slot]
        if in_use is not None:
            in_use.synchronize()
        buffer = self._buffers[slot][: source.numel()]
        buffer.copy_(source)
        event = self._link.copy(buffer, target, stream)
        self._events[slot] = event
        return event
