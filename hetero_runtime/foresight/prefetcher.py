"""Prefetches of forecast experts, as many as the link can carry while layers run."""

from __future__ import annotations

import math
from functools import cached_property
from typing import NamedTuple

from hetero_gpu import SlabCache, Transfer
from hetero_runtime.foresight.link import Link
from hetero_runtime.foresight.pace import Pace
from hetero_scheduler import ExpertKey
from hetero_scheduler.eviction import keeping
from hetero_scheduler.prefetch import Task
from hetero_scheduler.prefetch.steering import Steering
from hetero_scheduler.slots import Scores

MOST_UNDER_WAY = 16
"""What a layer turns out to miss waits behind all copies that are under way, on a link or at a disk."""


class _UnderWay(NamedTuple):
    task: Task
    transfer: Transfer
    copy_s: float
    """Seconds of the link's time; infinite while that is not known."""


class _Layer:
    """What the layer that runs leaves to prefetches: looked up once, for no one else takes a slot meanwhile.

    `running`: its experts, which stay. `kept_back`: slots that are left.
    """

    def __init__(
        self, cache: SlabCache, steering: Steering, *, pos: int, running: list[ExpertKey], kept_back: int
    ) -> None:
        self._cache, self._eviction = cache, steering.eviction
        self.pos, self._running, self._kept_back = pos, running, kept_back
        self._num_spare: dict[range, int] = {}

    def is_of(self, pos: int, running: list[ExpertKey], *, kept_back: int) -> bool:
        """Whether this is that layer, with those experts."""
        return (pos, kept_back) == (self.pos, self._kept_back) and running == self._running

    @cached_property
    def score(self) -> Scores:
        """Who gives way."""
        return keeping(self._eviction.prefetch_score, self._running)

    def has_slots(self, layer: int) -> bool:
        """Whether a prefetch for `layer` leaves enough."""
        pool = self._cache.pool(layer)
        if pool not in self._num_spare:
            num_available = self._cache.num_available_after(layer, self._running)
            self._num_spare[pool] = num_available - self._kept_back
        return self._num_spare[pool] > 0

    def prefetch(self, key: ExpertKey) -> bool:
        """Submit it; False when nobody gives way."""
        is_submitted = self._cache.prefetch(key, score=self.score)
        self._num_spare[self._cache.pool(key.layer)] -= is_submitted
        return is_submitted


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
        self._layer = _Layer(cache, steering, pos=-1, running=[], kept_back=top_k)

    def fill(self, pos: int, running: list[ExpertKey], *, kept_back: int | None = None) -> None:
        """Submit what the link has room for. `pos`: of the layer that runs; `running`: its experts, all
        resident or on their way, which stay. `kept_back`: slots that are left; None leaves top-k."""
        if self._steering.schedule is None:
            return
        left = self._top_k if kept_back is None else kept_back
        if self._layer.is_of(pos, running, kept_back=left):
            self.refill()
            return
        self._land()
        self._layer = _Layer(self._cache, self._steering, pos=pos, running=running, kept_back=left)
        self._submit()

    def refill(self) -> None:
        """The layer of the last `fill` goes on, its experts stay: there is room once a copy has landed."""
        if self._land():
            self._submit()

    def _submit(self) -> None:
        """As many as there is room for."""
        while self._has_room():
            task = self._steering.next(
                self._layer.pos, is_present=self._cache.present(), has_slots=self._layer.has_slots
            )
            if task is None:
                return
            copy_s = self._link.copy_s(task.key)
            if task.confidence < self._least_confidence(copy_s):
                continue
            if self._layer.prefetch(task.key):
                transfer = self._cache.transfer(task.key)
                self._under_way.append(_UnderWay(task, transfer, math.inf if copy_s is None else copy_s))
            elif self._steering.is_shared:
                return  # nobody gives way to a prefetch, whichever it is

    def _has_room(self) -> bool:
        """Whether one more, if it takes what the last one takes, ends before the layer does; on a link that
        is not spare, whether one would begin before."""
        if not self._under_way and self._link.is_spare:
            return True
        if len(self._under_way) == MOST_UNDER_WAY:
            return False
        left_s = self._pace.left_s(self._cache.stall_s())
        if left_s is None:
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

    def _land(self) -> bool:
        """Tell the schedule of copies that have arrived, of those given up too if they were moved. Returns
        whether any was under way and is no more."""
        before, still = len(self._under_way), list[_UnderWay]()
        for number, copy in enumerate(self._under_way):
            if not copy.transfer.is_over():
                if self._link.keeps_order:
                    still = self._under_way[number:]
                    break
                still.append(copy)
            elif copy.transfer.is_done():
                self._tell(copy)
        self._under_way = still
        return len(still) < before

    def _tell(self, copy: _UnderWay) -> None:
        schedule = self._steering.schedule
        if schedule is not None and self._pace.layer_s and copy.copy_s < math.inf:
            schedule.landed(copy.task, copy.copy_s / self._pace.layer_s)
