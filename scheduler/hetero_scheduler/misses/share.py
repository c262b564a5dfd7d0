"""A fixed share of each layer's misses is computed in place."""

from __future__ import annotations

import math

from hetero_scheduler.misses.base import LayerDemand, MissPolicy
from hetero_scheduler.misses.split import least_worth

SHARES = (0.0, 0.2, 0.35, 0.5, 0.7, 1.0)
"""What a captured step tries, of a layer's misses; more between them would differ in no layer of eight
experts."""


class FixedShare(MissPolicy):
    """The `share` (0 to 1) of least worth, rounded to the nearest whole expert, halves up. No clock is
    asked, so the same requests in the same order are split alike in every run."""

    def __init__(self, share: float) -> None:
        if not 0 <= share <= 1:
            raise ValueError(f"share is {share}; it must be 0 to 1")
        self._share = share

    def choose(self, demand: LayerDemand) -> list[int]:
        num_misses = len(demand.miss_tokens)
        number = math.floor(self._share * num_misses + 0.5)
        return least_worth(max(0, min(number, num_misses - demand.num_empty)), demand.worth)
