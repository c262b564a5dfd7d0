"""Slabs that follow the logical cache: what it holds not leaves first."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from hetero_scheduler import EvictionPolicy
from hetero_scheduler.routing import LogicalCache

HELD = 2.0**32
"""Above every priority: those of LRU count steps."""


class LogicalEviction(EvictionPolicy):
    """Score: the routing policy's priority, and far above all others what a logical cache of the running pass
    holds. So a slot machine with a pool of `capacity` slots a layer evicts what Algorithm 1 evicts."""

    name = "logical"

    def observe(self, layer: int, tokens_per_expert: npt.NDArray[np.int64]) -> None:
        self.passes[layer] += 1

    def follow(self, layer: int, caches: Sequence[LogicalCache]) -> None:
        """`layer` of `caches`, those of the running pass, has changed."""
        scores = [HELD * cache.is_resident()[layer] + cache.priority(layer) for cache in caches]
        np.max(scores, axis=0, out=self.score[layer])
