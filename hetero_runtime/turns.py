"""Whose step is next, when several requests share one engine."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager


class Turns:
    """A lock that is handed on in the order of asking.

    A plain lock may be taken again and again by the thread that just let it go; here every waiting request
    gets one step before anyone gets a second.
    """

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._waiting: deque[threading.Event] = deque()
        self._is_taken = False

    @contextmanager
    def take(self) -> Iterator[None]:
        """Wait for the turn and hold it inside the context."""
        with self._guard:
            mine = threading.Event()
            if self._is_taken:
                self._waiting.append(mine)
            else:
                self._is_taken = True
                mine.set()
        try:
            mine.wait()
            yield
        finally:
            self._leave(mine)

    def _leave(self, mine: threading.Event) -> None:
        """Hand the turn on; or, where waiting for it was interrupted (Ctrl-C), leave the queue."""
        with self._guard:
            if not mine.is_set():
                self._waiting.remove(mine)
            elif self._waiting:
                self._waiting.popleft().set()
            else:
                self._is_taken = False
