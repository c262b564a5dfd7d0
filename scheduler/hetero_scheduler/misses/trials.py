"""Which share of its misses a captured step hands to the CPU, found by trying: whole steps are timed.

    settle ─ measure │ settle ─ measure │ ...     a block for each share that is still in the race,
                                                  round by round; who is far behind leaves the race
    rest ──────────────────────────────── │ ...   with the winner; then once more, it and its neighbours,
                                                  which may take a hundredth of the time

What one expert costs each way does not say what a share is worth. Link and CPU read the same memory, so each
slows the other down; and an expert computed in place is not resident afterwards, so it misses again. Both are
in the time of a step, the second one only after a while: so each block begins with steps that do not count.
And the machine now and then does something else for longer than shares are apart: so the slowest and the
fastest quarter of what is timed count as little.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

SHARES = (0.0, 0.2, 0.35, 0.5, 0.7, 1.0)
"""Of a layer's misses; more between them would differ in no layer of eight experts."""
SETTLE_STEPS = 16
"""Slots are refilled some times over meanwhile, and steps that were under way have ended."""
BLOCK_STEPS = 32
"""That count: how many experts miss differs more from step to step than what the shares are apart."""
LEAST_STEPS = 8
HOPELESS = 1.5
"""Times the best block of the first round: a block that is so far behind ends after LEAST_STEPS."""
BEHIND = (1.2, 1.08, 1.04, 1.0)
"""Of the best, after each round: shares that took longer leave the race, and with 1.0 all but the best."""
GAIN = 0.05
"""Helping has to save as much of a step; what the step does to ask for help, whoever gives it, costs some."""
HYSTERESIS = 0.02
"""Of the time: a neighbour has to be faster by that to take over."""
REST_STEPS, MOST_REST = 1024, 16384
"""Steps between two races: twice as many each time that nothing changes, up to the second number."""
COST = 0.01
"""Of the time: what racing again may lose to resting with the share that was kept. It rests longer for it."""


class _Lap(NamedTuple):
    """Steps timed together."""

    steps: int
    seconds: float

    @property
    def step_s(self) -> float:
        return self.seconds / self.steps


class _Times:
    """What was timed of one share."""

    def __init__(self) -> None:
        self._laps: list[_Lap] = []
        self.steps = 0

    def add(self, lap: _Lap) -> None:
        """One lap more."""
        self._laps.append(lap)
        self.steps += lap.steps

    def step_s(self) -> float:
        """Seconds of a step, the mean of the laps between the quartiles; there was one."""
        laps = sorted(self._laps, key=lambda lap: lap.step_s)
        left_out = len(laps) // 4
        inner = laps[left_out : len(laps) - left_out]
        return sum(lap.seconds for lap in inner) / sum(lap.steps for lap in inner)

    def least_step_s(self) -> float:
        """Seconds of a step of the fastest lap."""
        return min(lap.step_s for lap in self._laps)


class Trials:
    """`share` is what applies now; `observe` hears what steps took under it, in order.

    `is_lost`: no share saves GAIN of a step, so all misses are loaded, for good; `share` is 0 then.
    """

    def __init__(self, shares: Sequence[float] = SHARES) -> None:
        """`shares`: ascending from 0, at least two. Raises ValueError for others."""
        if len(shares) < 2 or shares[0] != 0 or list(shares) != sorted(set(shares)):
            raise ValueError(f"shares {tuple(shares)} do not ascend from 0, one of them at least above it")
        self._shares = tuple(shares)
        self._rest = REST_STEPS
        self._kept: int | None = None
        self.is_lost = False
        self.step_s: dict[float, float] = {}
        """Seconds of a step in the last race, by share."""
        self._begin_race(range(len(shares)))

    @property
    def share(self) -> float:
        """Of a layer's misses, to be computed in place."""
        return self._shares[self._now]

    @property
    def is_racing(self) -> bool:
        """Whether the best share is yet to be found, or found again."""
        return bool(self._racing)

    def observe(self, steps: int, seconds: float) -> None:
        """So many steps, one or more, took so long together."""
        if self.is_lost:
            return
        if self._racing:
            self._time(_Lap(steps, seconds))
            return
        self._left -= steps
        if self._left <= 0:
            assert self._kept is not None, "nothing rests before a race"
            self._begin_race(range(max(0, self._kept - 1), min(len(self._shares), self._kept + 2)))

    # ---- a race

    def _begin_race(self, racing: range) -> None:
        self._racing = list(racing)
        self._times = {share: _Times() for share in racing}
        self._round = 0 if self._kept is None else 1  # neighbours were in the race before: half as patient
        self._raced = _Lap(0, 0.0)
        self._begin_block(self._racing[0])

    def _begin_block(self, share: int) -> None:
        self._now, self._settling, self._block_steps = share, SETTLE_STEPS, 0

    def _time(self, lap: _Lap) -> None:
        self._raced = _Lap(self._raced.steps + lap.steps, self._raced.seconds + lap.seconds)
        if self._settling > 0:
            self._settling -= lap.steps
            return
        self._times[self._now].add(lap)
        self._block_steps += lap.steps
        if self._block_steps >= BLOCK_STEPS or self._is_hopeless():
            self._end_block()

    def _is_hopeless(self) -> bool:
        """Whether the running block need not go on: whatever was timed of its share is far behind."""
        if self._block_steps < LEAST_STEPS:
            return False
        others = [t.step_s() for share, t in self._times.items() if share != self._now and t.steps]
        return bool(others) and self._times[self._now].least_step_s() > HOPELESS * min(others)

    def _end_block(self) -> None:
        following = self._racing.index(self._now) + 1
        if following < len(self._racing):
            self._begin_block(self._racing[following])
        else:
            self._end_round()

    def _end_round(self) -> None:
        best = min(self._racing, key=self._step_s)
        most_s = BEHIND[self._round] * self._step_s(best)
        self._racing = [share for share in self._racing if share == best or self._step_s(share) < most_s]
        self._round += 1
        if len(self._racing) > 1:
            self._begin_block(self._racing[0])
        else:
            self._end_race(best)

    def _end_race(self, best: int) -> None:
        self._racing = []
        self.step_s = {self._shares[share]: times.step_s() for share, times in self._times.items()}
        kept = self._kept
        if kept is not None and self._step_s(best) > (1 - HYSTERESIS) * self._step_s(kept):
            best = kept
        self.is_lost = 0 in self._times and self._step_s(best) > (1 - GAIN) * self._step_s(0)
        self._rest = min(2 * self._rest, MOST_REST) if best == kept else REST_STEPS
        self._left = self._rest if kept is None else max(self._rest, self._steps_for(best))
        self._kept = self._now = 0 if self.is_lost else best

    def _steps_for(self, best: int) -> int:
        """Steps to rest, of which what the race lost is no more than COST."""
        lost = self._raced.seconds / self._step_s(best) - self._raced.steps
        return math.ceil(lost / COST)

    def _step_s(self, share: int) -> float:
        return self._times[share].step_s()
