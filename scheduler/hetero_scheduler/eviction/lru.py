"""Least recently used."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hetero_scheduler.eviction.base import EvictionPolicy


class Lru(EvictionPolicy):
    """Score: the time of the last use, in layers executed."""

    def __init__(self, num_layers: int, num_experts: int) -> None:
        super().__init__(num_layers, num_experts)
        self._now = 0

    def observe(self, layer: int, tokens_per_expert: npt.NDArray[np.int64]) -> None:
        self._now += 1
        self.score[layer, np.flatnonzero(tokens_per_expert)] = self._now
