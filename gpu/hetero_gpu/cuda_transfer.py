"""Copies over the link on a CUDA stream of their own."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch

from hetero_gpu.transfer import Fence, LinkCopier, Point, Transfer

CopyBytes = Callable[[torch.Tensor, torch.Tensor, torch.cuda.Stream], object]
"""`copy(source, slab, stream)`: enqueue one host-to-device copy."""


def copy_directly(source: torch.Tensor, slab: torch.Tensor, stream: torch.cuda.Stream) -> None:
    """Enqueue a copy: asynchronous from registered memory; from pageable memory it holds up the host."""
    with torch.cuda.stream(stream):
        slab.copy_(source, non_blocking=True)


def fence_of(device: torch.device) -> torch.cuda.Event:
    """The point that the compute stream of `device` has reached in submission order."""
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event


class StallClock:
    """Adds up how long the compute stream stood at waits, from pairs of timing events."""

    def __init__(self) -> None:
        self._open: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        self._total_s = 0.0

    def add(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> None:
        self._open.append((begin, end))
        if len(self._open) > 1024:
            self.collect()

    def collect(self) -> float:
        """Seconds so far; pairs still running are counted later."""
        while self._open and self._open[0][1].query():
            begin, end = self._open.popleft()
            self._total_s += begin.elapsed_time(end) / 1e3
        return self._total_s


class CudaTransfer(Transfer):
    """One copy on the transfer stream."""

    def __init__(self, done: torch.cuda.Event, clock: StallClock) -> None:
        self.done, self._clock = done, clock

    def is_done(self) -> bool:
        return bool(self.done.query())

    def wait(self) -> None:
        stream = torch.cuda.current_stream()
        if self.done.query():
            stream.wait_event(self.done)
            return
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record(stream)
        stream.wait_event(self.done)
        end.record(stream)
        self._clock.add(begin, end)


class CudaCopier(LinkCopier):
    """Copies on a stream of their own; `copy` says how bytes cross (directly, or through a staging ring).

    What is brought back has another: it waits for no computation, and the link carries both ways at once.
    """

    def __init__(self, device: torch.device, copy: CopyBytes = copy_directly) -> None:
        self._device, self._copy = device, copy
        self._stream = torch.cuda.Stream(device)
        self._back: torch.cuda.Stream | None = None
        self._clock = StallClock()
        self._waited_for: Fence | None = None

    def submit(self, source: torch.Tensor, slab: torch.Tensor, *, after: Fence | None) -> Transfer:
        if after is not None and after is not self._waited_for:  # copies keep their order: once is enough
            assert isinstance(after, torch.cuda.Event), f"a CUDA copy cannot wait for {type(after).__name__}"
            self._stream.wait_event(after)
            self._waited_for = after
        self._copy(source, slab, self._stream)
        done = torch.cuda.Event()
        done.record(self._stream)
        return CudaTransfer(done, self._clock)

    def bring_back(self, slab: torch.Tensor, into: torch.Tensor, *, copied: Transfer) -> Point:
        assert isinstance(copied, CudaTransfer), f"a CUDA copy cannot follow {type(copied).__name__}"
        if self._back is None:
            self._back = torch.cuda.Stream(self._device)
        self._back.wait_event(copied.done)
        with torch.cuda.stream(self._back):
            into.copy_(slab, non_blocking=True)
        there = torch.cuda.Event()
        there.record(self._back)
        self._stream.wait_event(there)
        return there

    def fence(self) -> Fence | None:
        return fence_of(self._device)

    def stall_s(self) -> float:
        return self._clock.collect()

    def synchronize(self) -> None:
        self._stream.synchronize()
        if self._back is not None:
            self._back.synchronize()
