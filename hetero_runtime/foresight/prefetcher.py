"""Prefetches of forecast experts, as many as the link can carry while layers run."""

from __future__ import annotations

import math
from typing import NamedTuple

from hetero_gpu import SlabCache, Transfer
from hetero_runtime.foresight.link import Link
from hetero_runtime.foresight.pace import Pace
from hetero_scheduler import ExpertKey
from hetero_scheduler.prefetch import Task
from hetero_scheduler.prefetch.steering import Steering

MOST_UNDER_WAY = 16
"""What a layer turns out to miss waits behind all copies that are under way, on a link or at a disk."""


class _UnderWay(NamedTuple):
    task: Task
    transfer: Transfer
    copy_s: float
    """Seconds of the link's time; infinite while that is not known."""


class Prefetcher:
    """Asks the schedule whenever the link has room.

    Room is what the link moves before the layer that runs is over, at least one copy: so all but that one
    have arrived when the next layer may demand experts. On a link that is not spare a copy that runs over
    has to be worth it: what it hides if it is wanted, against what it delays if not, by its confidence.
    `top_k`: slots that a prefetch leaves.
    """

    def __init__(self, cache: SlabCache, steering: Steering, *, link: Link, pace: Pace, top_k: int) -> None:
        self._cache, self._steering = cache, steering
        self._link, self._pace, self._top_k = link, pace, top_k
        self._under_way: list[_UnderWay] = []

    def fill(self, pos: int, running: list[ExpertKey], *, kept_back: int | None = None) -> None:
        """Submit what the link has room for. `pos`: of the layer that runs; `running`: its experts, all
        resident or on their way, which stay. `kept_back`: slots that are left; None leaves top-k."""
        if self._steering.schedule is None:
            return
        self._land()
        left = self._top_k if kept_back is None else kept_back
        while self._has_room():
            task = self._steering.next(
                pos,
                is_present=self._cache.present(),
                has_slots=lambda layer: self._cache.num_available_after(layer, running) > left,
            )
            if task is None:
                return
            copy_s = self._link.copy_s(task.key)
            if task.confidence < self._least_confidence(copy_s):
                continue
            if self._cache.prefetch(task.key, protected=running):
                transfer = self._cache.transfer(task.key)
                self._under_way.append(_UnderWay(task, transfer, math.inf if copy_s is None else copy_s))
            elif self._steering.is_shared:
                return  # nobody gives way to a prefetch, whichever it is

    def _has_room(self) -> bool:
        """Whether one more, if it takes what the last one takes, ends before the layer does; on a link that
        is not spare, whether one would begin before."""
        if not self._under_way and self._link.is_spare:
            return True
        left_s = self._pace.left_s(self._cache.stall_s())
        if left_s is None or len(self._under_way) == MOST_UNDER_WAY:
            return False
        if not self._link.is_spare:
            return self._spent_s() < left_s
        return self._spent_s() + self._under_way[-1].copy_s <= left_s

    def _spent_s(self) -> float:
        """Seconds of the link's time that copies under way take."""
        return sum(copy.copy_s for copy in self._under_way)

    def _least_confidence(self, copy_s: float | None) -> float:
        """From which confidence on one more copy pays: p times what the layer hides of it is more than
        (1 - p) times the rest, by which it delays the next layer in vain."""
        if self._link.is_spare:
            return 0.0
        left_s = self._pace.left_s(self._cache.stall_s())
        if copy_s is None or left_s is None:
            return math.inf
        hidden_s = min(max(0.0, left_s - self._spent_s()), copy_s)
        return 1.0 - hidden_s / copy_s

    def _land(self) -> None:
        """Tell the schedule of copies that have arrived, of those given up too if they were moved."""
        schedule = self._steering.schedule
        for task, transfer, copy_s in self._under_way:
            if transfer.is_done() and schedule is not None and self._pace.layer_s and copy_s < math.inf:
                schedule.landed(task, copy_s / self._pace.layer_s)
        self._under_way = [copy for copy in self._under_way if not copy.transfer.is_over()]
