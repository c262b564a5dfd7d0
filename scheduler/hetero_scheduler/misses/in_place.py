"""Misses are computed where they lie."""

from __future__ import annotations

from hetero_scheduler.misses.base import LayerDemand, MissPolicy
from hetero_scheduler.misses.split import least_worth


class AllInPlace(MissPolicy):
    """Nobody is evicted for a miss."""

    def choose(self, demand: LayerDemand) -> list[int]:
        num_misses = len(demand.miss_tokens)
        return least_worth(max(0, num_misses - demand.num_empty), demand.worth)
