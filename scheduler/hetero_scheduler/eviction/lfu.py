"""Least frequently used."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hetero_scheduler.eviction.base import EvictionPolicy


class Lfu(EvictionPolicy):
    """Score: the number of forward passes that used the expert.

    Passes, not tokens: one long prompt would otherwise outweigh everything that decoding does after it.
    """

    name = "lfu"

    def observe(self, layer: int, tokens_per_expert: npt.NDArray[np.int64]) -> None:
        self.passes[layer] += 1
        self.score[layer, np.flatnonzero(tokens_per_expert)] += 1.0
