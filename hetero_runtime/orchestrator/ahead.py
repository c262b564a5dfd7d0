"""What looks ahead while layers run, by whatever it knows of layers to come."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hetero_scheduler import ExpertKey
from hetero_scheduler.counters import Counters


@dataclass(frozen=True)
class PredictionStats(Counters):
    """What forecasts cost. `layers`: at which one was asked for; `seconds`: of the host, all told."""

    layers: int = 0
    seconds: float = 0.0

    @property
    def ms_a_layer(self) -> float:
        """0 where nobody forecasts."""
        return 1e3 * self.seconds / self.layers if self.layers else 0.0


class Ahead(ABC):
    """Told by the orchestrator of every MoE layer of a pass, in this order; may prefetch from `look_ahead`
    on."""

    @abstractmethod
    def layer_begins(self, chosen: npt.NDArray[np.int64]) -> None:
        """A MoE layer of the pass begins. `chosen` `[tokens, top_k]`: its experts."""

    def kept(self, layer: int) -> Collection[ExpertKey]:
        """Prefetches for `layer` that stay on their way although it runs without them. None, unless said."""
        return ()

    @abstractmethod
    def look_ahead(self, layer: int, running: list[ExpertKey]) -> None:
        """All loads of `layer` are submitted. `running`: its experts, all resident or on their way, which
        have to stay."""

    def expert_ran(self) -> None:  # noqa: B027 (few need that often)
        """One of the experts that `look_ahead` was told of has run. All of them stay: they are still to run
        or to be given back."""

    @abstractmethod
    def layer_ends(self, layer: int, running: list[ExpertKey]) -> None:
        """The link may have room. `running`: experts that stay."""

    def stats(self) -> PredictionStats:
        """What looking ahead has cost; zeros unless it takes a forecast."""
        return PredictionStats()
