"""Which of several ways to run a captured step is the fastest, found by trying: whole steps are timed.

    settle ─ measure │ settle ─ measure │ ...     a block for each choice that is still in the race,
                                                  round by round; who is far behind leaves the race
    rest ──────────────────────────────── │ ...   with the winner; then once more, it and its neighbours,
                                                  which may take a hundredth of the time; sooner, and with
                                                  whoever promised more, if it breaks its promise

The parts of a step do not say what a choice is worth. Of misses that the CPU computes, link and CPU read the
same memory, so each slows the other down; forecasts share the device with what they hurry. And an expert that
was computed in place, or driven out for a forecast, misses again. All of it is in the time of a step, the
last only after a while: so each block begins with steps that do not count, and steps are still timed when the
race is over. A winner that then takes longer than it did in its blocks has to race again, for all may have
become slower; if it wins and does the same once more, that is put to its time in every race to come. And the
machine now and then does something else for longer than choices are apart: so the slowest and the fastest
quarter of what is timed count as little.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T", bound=Hashable)

SETTLE_STEPS = 16
"""Slots are refilled some times over meanwhile, and steps that were under way have ended."""
BLOCK_STEPS = 32
"""That count: how many experts miss differs more from step to step than what choices are apart."""
LEAST_STEPS = 8
HOPELESS = 1.5
"""Times the best block of the first round: a block that is so far behind ends after LEAST_STEPS."""
BEHIND = (1.2, 1.08, 1.04, 1.0)
"""Of the best, after each round: choices that took longer leave the race, and with 1.0 all but the best."""
GAIN = 0.05
"""Of a step, that any other choice has to save over the plain one; else the plain one stays, for good."""
HYSTERESIS = 0.02
"""Of the time: a neighbour has to be faster by that to take over."""
REST_STEPS, MOST_REST = 1024, 16384
"""Steps between two races: twice as many each time that nothing changes, up to the second number."""
WATCH_STEPS = 128
"""With the kept choice, whose time is then compared with that in the race; twice as many each time that they
led to a race."""
BROKEN = 1.1
"""Times what it took in the race: a promise that was not kept."""
COST = 0.01
"""Of the time: what racing again may lose to resting with the choice that was kept. It rests longer then."""


class _Lap(NamedTuple):
    """Steps timed together."""

    steps: int
    seconds: float

    @property
    def step_s(self) -> float:
        return self.seconds / self.steps


class _Times:
    """What was timed of one choice."""

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


class Trials(Generic[T]):
    """`choice` is what applies now; `observe` hears what steps took under it, in order.

    `is_lost`: no other saves GAIN of a step, so `choice` is the plain one, for good.
    """

    def __init__(self, choices: Sequence[T]) -> None:
        """`choices`: the plain one, then one or more others, so that neighbours are alike. Raises ValueError
        for fewer, or for two that are equal."""
        if len(choices) < 2 or len(set(choices)) < len(choices):
            raise ValueError(f"choices {tuple(choices)}: a plain one and others are needed, no two equal")
        self._choices = tuple(choices)
        self._rest, self._watch = REST_STEPS, WATCH_STEPS
        self._kept: int | None = None
        self._promised: dict[int, float] = {}
        self._later = dict.fromkeys(range(len(choices)), 1.0)
        """Times what a choice takes in a race: what it takes after it."""
        self._doubted: int | None = None
        self.is_lost = False
        self.step_s: dict[T, float] = {}
        """Seconds of a step in the last race, by choice."""
        self._begin_race(range(len(choices)))

    @property
    def choice(self) -> T:
        """What is tried now, or was found to be the best."""
        return self._choices[self._now]

    @property
    def is_racing(self) -> bool:
        """Whether the best choice is yet to be found, or found again."""
        return bool(self._racing)

    @property
    def plain_s(self) -> float:
        """Seconds of a plain step in the last race, which it took part in."""
        return self.step_s[self._choices[0]]

    @property
    def helped_s(self) -> float:
        """Seconds of a step in the last race by the best of the other choices."""
        return min(seconds for choice, seconds in self.step_s.items() if choice != self._choices[0])

    def observe(self, steps: int, seconds: float) -> None:
        """So many steps, one or more, took so long together."""
        if self.is_lost:
            return
        lap = _Lap(steps, seconds)
        if self._racing:
            self._time(lap)
            return
        assert self._kept is not None, "nothing rests before a race"
        self._left -= steps
        self._watched.add(lap)
        if self._left <= 0:
            self._begin_race(range(max(0, self._kept - 1), min(len(self._choices), self._kept + 2)))
        elif self._watched.steps >= self._watch:
            self._compare(self._kept, self._watched.step_s())

    def _compare(self, kept: int, step_s: float) -> None:
        """What a step takes while resting with what the race promised, of this choice and of others."""
        self._watched = _Times()
        if step_s <= BROKEN * self._promised[kept]:
            self._doubted = None
            return
        if self._doubted == kept:
            self._later[kept] *= step_s / self._promised[kept]
        self._doubted = kept
        better = [each for each, seconds in self._promised.items() if seconds < (1 - HYSTERESIS) * step_s]
        if better == [kept]:
            self._promised[kept] = step_s
        else:
            self._watch *= 2
            self._begin_race(sorted(better))

    # ---- a race

    def _begin_race(self, racing: Sequence[int]) -> None:
        self._racing = list(racing)
        self._times = {number: _Times() for number in racing}
        self._round = 0 if self._kept is None else 1  # neighbours were in the race before: half as patient
        self._raced = _Lap(0, 0.0)
        self._begin_block(self._racing[0])

    def _begin_block(self, number: int) -> None:
        self._now, self._settling, self._block_steps = number, SETTLE_STEPS, 0

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
        """Whether the running block need not go on: whatever was timed of its choice is far behind."""
        if self._block_steps < LEAST_STEPS:
            return False
        others = [t.step_s() for number, t in self._times.items() if number != self._now and t.steps]
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
        self._racing = [each for each in self._racing if each == best or self._step_s(each) < most_s]
        self._round += 1
        if len(self._racing) > 1:
            self._begin_block(self._racing[0])
        else:
            self._end_race(best)

    def _end_race(self, best: int) -> None:
        self._racing, self._watched = [], _Times()
        raced = {number: self._step_s(number) for number in self._times}
        self._promised |= raced
        self.step_s = {self._choices[number]: seconds for number, seconds in raced.items()}
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

    def _step_s(self, number: int) -> float:
        return self._later[number] * self._times[number].step_s()
