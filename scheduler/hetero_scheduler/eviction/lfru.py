"""Frequency with forgetting: between LRU and LFU."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hetero_scheduler.eviction.base import EvictionPolicy


class Lfru(EvictionPolicy):
    """Score: log2 of the sum over past uses of 2^(-age / half_life), age in forward passes (the combined
    recency and frequency of Lee et al., "LRFU", IEEE Transactions on Computers 2001).

    Kept as log2(sum) + now / half_life, which ages every expert alike without touching it: the order of two
    unused experts never changes, so only used ones are updated.
    """

    name = "lfru"

    def __init__(self, num_layers: int, num_experts: int, *, half_life: float = 16.0) -> None:
        super().__init__(num_layers, num_experts)
        self.score[:] = -np.inf
        self.half_life = half_life

    def observe(self, layer: int, tokens_per_expert: npt.NDArray[np.int64]) -> None:
        self.passes[layer] += 1
        used = np.flatnonzero(tokens_per_expert)
        # one more use adds 2^(now / half_life) to the un-aged sum
        self.score[layer, used] = np.logaddexp2(self.score[layer, used], self.passes[layer] / self.half_life)
