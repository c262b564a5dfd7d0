"""The contract of an eviction policy."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from hetero_scheduler.keys import ExpertKey
from hetero_scheduler.predict.base import Forecast


class EvictionPolicy(ABC):
    """Eviction is a score: whoever scores least among the evictable leaves first.

    `score` is `[num_layers, num_experts]` float64, valid after each `observe`, and comparable between layers,
    because a global pool evicts across them. `passes`: `[num_layers]` int64, how often each layer was seen:
    the clock of every policy. `score` and `passes` are a policy's whole state.
    """

    name: ClassVar[str]
    half_life: float = 1.0
    """Passes after which a use counts half; only for a policy that forgets."""

    def __init__(self, num_layers: int, num_experts: int) -> None:
        self.score = np.zeros((num_layers, num_experts), dtype=np.float64)
        self.passes = np.zeros(num_layers, dtype=np.int64)

    @property
    def prefetch_score(self) -> npt.NDArray[np.float64]:
        """`score` as a prefetch sees it: infinite for experts that no prefetch may drive out. All alike,
        unless a policy guards some."""
        return self.score

    @abstractmethod
    def observe(self, layer: int, tokens_per_expert: npt.NDArray[np.int64]) -> None:
        """`layer` runs now and expert e gets `tokens_per_expert[e]` tokens (0: not used).

        Called once for each layer of each forward pass, before the layer's misses are loaded.
        """

    def observe_forecast(self, forecast: Forecast) -> None:  # noqa: B027 - most policies know history alone
        """A predictor's newest word, told after `observe` of the layer that led to it. A policy of history
        alone does not listen."""

    def restore(self, score: npt.NDArray[np.float64], passes: npt.NDArray[np.int64]) -> None:
        """Become what whoever kept the scores meanwhile says of them. Shapes as for `score` and `passes`."""
        self.score[:], self.passes[:] = score, passes


def keeping(score: npt.NDArray[np.float64], keys: Collection[ExpertKey]) -> npt.NDArray[np.float64]:
    """A copy of `score`, infinite for `keys`: for several reservations during which they must stay."""
    kept = score.copy()
    kept.put([layer * score.shape[1] + expert for layer, expert in keys], np.inf)
    return kept
