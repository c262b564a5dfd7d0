"""Probabilistic Belady: keep what the forecast wants soon (SeqMoE §7.1)."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import numpy.typing as npt

from hetero_scheduler.eviction.base import EvictionPolicy
from hetero_scheduler.predict.base import Forecast

NUM_STEPS, DECAY = 8, 0.75
"""c, as in the paper, and λ, which it leaves open; powers of 3/4 and their sums are exact."""
RECENT_WEIGHT = 1 / 16
"""What recent use counts beside a forecast; a power of two, so that the product is exact everywhere."""
RECENT_RATE = 1 / 128
"""What one use of an expert moves the record of recent use: half of it is of the last 11 tokens at top-8."""


class BeladyForecast(EvictionPolicy):
    """Score: Σ λ^j · p_j / Σ λ^j over the next c runs of the expert's layer, j = 0 the nearest, and a little
    of its share in the layer's recent uses.

    The paper's sum starts where the prefetched step ends; here it starts with the
    layer's next run, whichever that is: from a forecast on, that is the forecast's entry 0, and each time
    the layer runs the window moves one entry on. So an expert that is needed next is not given away before
    its layer has run, and one that was is judged by what comes after. A forecast therefore holds c + 1
    entries; where fewer are left, the sums end there; once none is left, the last sum stays.

    Recent use is a departure from the paper. Forecasts say little of what lies more than a few steps ahead,
    and most experts in a cache are not needed sooner; among those the ones that a text keeps coming back to
    are worth most. A pass moves the record towards its own shares by `RECENT_RATE` a use, so a prompt of more
    than a few tokens replaces what was there before.

    Until a layer has a forecast its experts score by last use, all of them below 0 and so below any forecast.
    Sums are added up nearest first, in float64: other places that compute them come to the same bits.
    """

    name: ClassVar[str] = "belady"

    def __init__(
        self, num_layers: int, num_experts: int, *, num_steps: int = NUM_STEPS, decay: float = DECAY
    ) -> None:
        """`num_steps`: c. `decay`: λ, in (0, 1). Raises ValueError outside these."""
        super().__init__(num_layers, num_experts)
        if num_steps < 1 or not 0 < decay < 1:
            raise ValueError(f"num_steps {num_steps} must be at least 1, decay {decay} between 0 and 1")
        self.score[:] = -np.inf
        self.recent = np.zeros_like(self.score)
        """Share of each layer's recent uses, summing to 1 at most."""
        self._expected = np.zeros_like(self.score)
        self._weights = decay ** np.arange(num_steps, dtype=np.float64)
        self._ahead: dict[int, npt.NDArray[np.float32]] = {}
        """By layer: probabilities of its coming runs, nearest first. `[runs, num_experts]`"""

    def observe(self, layer: int, tokens_per_expert: npt.NDArray[np.int64]) -> None:
        self.passes[layer] += 1
        self.recent[layer] = after_uses(self.recent[layer], tokens_per_expert)
        ahead = self._ahead.get(layer)
        if ahead is None:
            is_unforeseen = (tokens_per_expert > 0) & (self.score[layer] < 0)
            self.score[layer, is_unforeseen] = -1.0 / self.passes.sum()
        else:
            self._look_ahead(layer, ahead[1:])

    def observe_forecast(self, forecast: Forecast) -> None:
        """Take the predictor's newest word on the layers that it covers; entry 0 is each layer's next run.

        Called after `observe` of the layer that triggered the forecast, so that its window has moved on.
        """
        for index, layer in enumerate(forecast.layers):
            self._look_ahead(layer, forecast.probabilities[:, index])

    def restore(self, score: npt.NDArray[np.float64], passes: npt.NDArray[np.int64]) -> None:
        """As in the contract. Windows are not restored: a score that came of a forecast stays until the next
        forecast of its layer."""
        super().restore(score, passes)
        self._ahead.clear()

    def _look_ahead(self, layer: int, ahead: npt.NDArray[np.float32]) -> None:
        self._ahead[layer] = ahead
        weights = self._weights[: len(ahead)]
        if weights.size:
            terms = weights[:, None] * ahead[: weights.size]
            self._expected[layer] = np.add.accumulate(terms)[-1] / weights.sum()
        self.score[layer] = self._expected[layer] + RECENT_WEIGHT * self.recent[layer]


def after_uses(recent: npt.NDArray[np.float64], uses: npt.NDArray[np.integer]) -> npt.NDArray[np.float64]:
    """The record of recent use after a pass. `recent`: shares `[..., experts]`; `uses`: of the pass, counted,
    of that shape. A layer without a use stays as it was."""
    num_uses = uses.sum(axis=-1, keepdims=True)
    moved = np.minimum(num_uses * RECENT_RATE, 1.0)
    after: npt.NDArray[np.float64] = recent + moved * (uses / np.maximum(num_uses, 1) - recent)
    return after
