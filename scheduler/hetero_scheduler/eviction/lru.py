"""Least recently used."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hetero_scheduler.eviction.base import EvictionPolicy


class Lru(EvictionPolicy):
    """Score: the time of the last use, in layers executed."""

    name = "lru"

    def observe(self, layer: int, tokens_per_expert: npt.NDArray[np.int64]) -> None:
        self.passes[layer] += 1
        self.score[layer, np.flatnonzero(tokens_per_expert)] = self.passes.sum()
