"""Prefetches of forecast experts, as many as the link can carry while layers run."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from hetero_gpu import SlabCache, Transfer
from hetero_runtime.foresight.link import Link
from hetero_runtime.foresight.pace import Pace
from hetero_scheduler import ExpertKey
from hetero_scheduler.prefetch import Task
from hetero_scheduler.prefetch.steering import Steering

MOST_UNDER_WAY = 16
"""Copies finish in order, so what a layer turns out to miss waits behind all that are under way."""


class _UnderWay(NamedTuple):
    task: Task
    transfer: Transfer


class Prefetcher:
    """Asks the schedule whenever the link has room.

    Room is what the link moves before the layer that runs is over, at least one copy: so all but that one
    have arrived when the next layer may demand experts. `top_k`: slots that a prefetch leaves.
    """

    def __init__(self, cache: SlabCache, steering: Steering, *, link: Link, pace: Pace, top_k: int) -> None:
        self._cache, self._steering = cache, steering
        self._link, self._pace, self._top_k = link, pace, top_k
        self._under_way: deque[_UnderWay] = deque()

    def fill(self, pos: int, running: list[ExpertKey]) -> None:
        """Submit what the link has room for. `pos`: of the layer that runs; `running`: its experts, all
        resident or on their way, which stay."""
        if self._steering.schedule is None:
            return
        self._land()
        while len(self._under_way) < self._room():
            task = self._steering.next(
                pos,
                is_present=self._cache.present(),
                has_slots=lambda layer: self._cache.num_available_after(layer, running) > self._top_k,
            )
            if task is None:
                return
            if self._cache.prefetch(task.key, protected=running):
                self._under_way.append(_UnderWay(task, self._cache.transfer(task.key)))

    def _room(self) -> int:
        left_s = self._pace.left_s(self._cache.stall_s())
        return 1 if left_s is None else max(1, min(MOST_UNDER_WAY, int(left_s / self._link.copy_s)))

    def _land(self) -> None:
        """Tell the schedule of copies that have arrived, of those given up meanwhile too: they were moved."""
        schedule = self._steering.schedule
        while self._under_way and self._under_way[0].transfer.is_done():
            task = self._under_way.popleft().task
            if schedule is not None and self._pace.layer_s:
                schedule.landed(task, self._link.copy_s / self._pace.layer_s)
