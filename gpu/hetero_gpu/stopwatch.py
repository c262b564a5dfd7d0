"""How long a stretch of work keeps a device, known without waiting for it.

host      start ── stop                     the time between, at once
CUDA      event ── work ── event            known when the device has passed the second one
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from typing import Generic, NamedTuple, TypeVar

import torch

T = TypeVar("T")


class Lap(NamedTuple, Generic[T]):
    """A stretch of work, `what` its owner calls it, and its seconds."""

    what: T
    seconds: float


class Stopwatch(ABC, Generic[T]):
    """One stretch at a time: `start`, `stop`; `laps` when they are known."""

    @abstractmethod
    def start(self) -> None:
        """What is submitted from now on is timed."""

    @abstractmethod
    def stop(self, what: T) -> None:
        """The stretch ends with what was submitted until now."""

    @abstractmethod
    def laps(self) -> list[Lap[T]]:
        """Stretches that have ended since the last call, in order. Never blocks."""


class HostStopwatch(Stopwatch[T]):
    """Device `cpu`: work is done when it is submitted."""

    def __init__(self) -> None:
        self._began = 0.0
        self._laps: list[Lap[T]] = []

    def start(self) -> None:
        self._began = time.perf_counter()

    def stop(self, what: T) -> None:
        self._laps.append(Lap(what, time.perf_counter() - self._began))

    def laps(self) -> list[Lap[T]]:
        laps, self._laps = self._laps, []
        return laps


class CudaStopwatch(Stopwatch[T]):
    """Pairs of timing events on the current stream."""

    def __init__(self) -> None:
        self._begin: torch.cuda.Event | None = None
        self._open: deque[tuple[T, torch.cuda.Event, torch.cuda.Event]] = deque()

    def start(self) -> None:
        self._begin = torch.cuda.Event(enable_timing=True)
        self._begin.record()

    def stop(self, what: T) -> None:
        assert self._begin is not None, "stop without start"
        end = torch.cuda.Event(enable_timing=True)
        end.record()
        self._open.append((what, self._begin, end))
        self._begin = None

    def laps(self) -> list[Lap[T]]:
        laps = []
        while self._open and self._open[0][2].query():
            what, begin, end = self._open.popleft()
            laps.append(Lap(what, begin.elapsed_time(end) / 1e3))
        return laps


def stopwatch_for(device: torch.device) -> Stopwatch[T]:
    """The stopwatch for work on `device`."""
    return HostStopwatch() if device.type == "cpu" else CudaStopwatch()
