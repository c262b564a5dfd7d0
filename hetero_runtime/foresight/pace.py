"""How fast layers run, by a monotonic clock."""

from __future__ import annotations

import time
from collections.abc import Callable

SMOOTHING = 0.1
"""Weight of the newest layer in the moving average; the budget's own (SeqMoE Algorithm 1, α)."""


class Pace:
    """The time from one MoE layer to the next, stalls left out, as a moving average."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began_s: float | None = None
        self._stalled_s = 0.0
        self.layer_s: float | None = None
        """None before two layers of one pass have been seen."""

    def pass_begins(self) -> None:
        """The time since the last pass belongs to no layer: somebody may have read what was said."""
        self._began_s = None

    def layer_begins(self, stalled_s: float) -> None:
        """A layer begins. `stalled_s`: seconds that computation has waited for copies, all told."""
        now = self._clock()
        if self._began_s is not None:
            taken = max(0.0, now - self._began_s - (stalled_s - self._stalled_s))
            before = taken if self.layer_s is None else self.layer_s
            self.layer_s = before + SMOOTHING * (taken - before)
        self._began_s, self._stalled_s = now, stalled_s

    def left_s(self, stalled_s: float) -> float | None:
        """Seconds until the layer that runs should be over, 0 at least; None while that is not known."""
        if self.layer_s is None or self._began_s is None:
            return self.layer_s
        gone = self._clock() - self._began_s - (stalled_s - self._stalled_s)
        return max(0.0, self.layer_s - gone)
