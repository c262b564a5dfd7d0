"""Memory given back while the machine is short of it, and taken again when it is not.

    free      0 ──────── low ───────────── high ──────────────── total
    slots     give back   │ nothing changes │ take again, a few at a time, after a while of calm
                            (but give back some when tasks stall for memory)

The gap between the marks, the pause after each step and the wait for calm keep it from swinging: what it
takes again never brings free memory below `high`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

from hetero_runtime.tiers.pressure import Pressure, read_pressure

log = logging.getLogger(__name__)

LOOK_S = 0.5
"""Between two looks, so that a step shows in the numbers before the next."""
CALM_S = 10.0
"""So long memory must have been plentiful before anything is taken again."""
STALLED = 0.1
"""Share of time waiting for memory from which some is given back before it is short."""
_STEP = 8
"""A step for stalls, and a step back, is this part of all slots."""


class Marks(NamedTuple):
    """Bytes of free memory: below `low` the tier shrinks, above `high` it may grow."""

    low: int
    high: int

    @classmethod
    def of(cls, total_bytes: int) -> Marks:
        """For a machine, or a container, of so much memory."""
        low = min(total_bytes // 64, 256 << 20)
        return cls(low, 2 * low)


class Tier(Protocol):
    """Slots that can be given back."""

    def shrink(self, num_slots: int) -> int:
        """Give up to `num_slots` back, with their memory. Returns how many."""

    def grow(self, num_slots: int) -> int:
        """Take up to `num_slots` again. Returns how many."""


class Governor:
    """Looks at memory now and then, and lets `tier` follow. The caller has the turn when it calls `look`."""

    def __init__(
        self,
        tier: Tier,
        *,
        num_slots: int,
        slot_bytes: int,
        marks: Marks,
        read: Callable[[], Pressure] = read_pressure,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`num_slots`: of the tier when it is whole."""
        self._tier, self._num_slots, self._slot_bytes, self._marks = tier, num_slots, slot_bytes, marks
        self._read, self._clock = read, clock
        self._next_s, self._calm_since_s = 0.0, clock()
        self.num_given_back = 0

    def look(self) -> None:
        """Give back or take again what the memory of now asks for. Cheap between looks."""
        now = self._clock()
        if now < self._next_s:
            return
        self._next_s = now + LOOK_S
        pressure = self._read()
        if pressure.free_bytes <= self._marks.high:
            self._calm_since_s = now
        change = self._wanted(pressure, calm_s=now - self._calm_since_s)
        if change < 0:
            self._give_back(-change, pressure)
        elif change > 0:
            self.num_given_back -= self._tier.grow(change)

    def _wanted(self, pressure: Pressure, *, calm_s: float) -> int:
        """Slots to take (above 0) or to give back (below)."""
        step = max(1, self._num_slots // _STEP)
        if pressure.free_bytes < self._marks.low:
            return (pressure.free_bytes - self._marks.low) // self._slot_bytes
        if pressure.stalled > STALLED and pressure.free_bytes < self._marks.high:
            return -step
        if calm_s < CALM_S:
            return 0
        room = (pressure.free_bytes - self._marks.high) // self._slot_bytes
        return min(step, self.num_given_back, room)

    def _give_back(self, num_slots: int, pressure: Pressure) -> None:
        given = self._tier.shrink(num_slots)
        self.num_given_back += given
        if given:
            log.warning(
                "memory is short (%.0f MB free, %.0f%% of the time somebody waits for it): the expert cache "
                "gives back %d of %d slabs",
                pressure.free_bytes / 1e6,
                100 * pressure.stalled,
                self.num_given_back,
                self._num_slots,
            )
