"""A backend whose calls block: one thread beside the engine's makes them, one at a time."""

from __future__ import annotations

from abc import abstractmethod
from concurrent.futures import Future, ThreadPoolExecutor

from hetero_runtime.in_place.base import Done, InPlaceExperts, Work


class OneThreadExperts(InPlaceExperts):
    """Computes on `thread`, which has one worker and is ended with this."""

    def __init__(self, thread: ThreadPoolExecutor) -> None:
        self._thread = thread
        self._running: Future[Done] | None = None

    def submit(self, work: Work) -> None:
        if self._running is not None:
            self.wait()
        self._running = self._thread.submit(self._compute, work)

    def wait(self) -> Done:
        assert self._running is not None, "wait without submitted work"
        running, self._running = self._running, None
        return running.result()

    def close(self) -> None:
        self._thread.shutdown()

    @abstractmethod
    def _compute(self, work: Work) -> Done:
        """Do `work`, on the thread."""
