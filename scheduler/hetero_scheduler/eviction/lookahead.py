"""Lookahead priority with the expired guard (VisMMOE §3.4.2)."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import numpy.typing as npt

from hetero_scheduler.eviction.base import EvictionPolicy
from hetero_scheduler.eviction.lru import Lru
from hetero_scheduler.predict.base import Forecast
from hetero_scheduler.prefetch.top_b import DECAY, SIZE, WINDOW

SMOOTHING = 0.5
"""Weight of a layer's newest run in what is kept of it."""
REQUIRED = 2.0
"""Added to priorities, which are at most 1: whoever is required scores above all others."""


class Lookahead(EvictionPolicy):
    """Where the layers of the window are those that run within the next W, round the end of a pass:

        kind        layer             expert                        score
        required    in the window     among its B of most priority  2 + priority
        speculative in the window     any other                     priority
        expired     has run, outside  any                           priority over its last runs

    A prefetch takes the place of expired experts alone (`prefetch_score`). What a layer has to have is loaded
    in any case, over whoever has the least priority: the window is half of a shallow model, and experts that
    were used just now outside it are worth more than those inside that nobody expects. Required ones give
    way last.

    The priority of a layer to come is its newest forecast, γ^(d-1) times at a distance of d layers. Once it
    has run, that forecast is averaged into its earlier ones, for reuse from step to step; a run that nobody
    forecast leaves the share of its tokens instead. The window takes half of the layers at most, so that some
    are expired in a shallow model too.
    """

    name: ClassVar[str] = "lookahead"

    def __init__(
        self,
        num_layers: int,
        num_experts: int,
        *,
        window: int = WINDOW,
        decay: float = DECAY,
        size: int = SIZE,
    ) -> None:
        """`window`: W, layers. `decay`: γ, in (0, 1]. `size`: B, experts. Raises ValueError outside these."""
        super().__init__(num_layers, num_experts)
        if window < 1 or size < 1 or not 0 < decay <= 1:
            raise ValueError(
                f"window {window} and size {size} must be at least 1, decay {decay} above 0 and at most 1"
            )
        self._window, self._size = min(window, num_layers // 2), size
        self._decays = decay ** np.arange(self._window)[:, None]
        self._kept = np.zeros_like(self.score)
        self._expected = np.zeros_like(self.score)
        self._is_foreseen = np.zeros(num_layers, dtype=np.bool_)
        self._layer = -1
        """The one that runs or ran last."""
        self._is_within = np.zeros(num_layers, dtype=np.bool_)

    @property
    def kept(self) -> npt.NDArray[np.float64]:
        """What is kept of each layer's runs, whatever is foreseen: a copy. Shape as `score`."""
        return self._kept.copy()

    @property
    def prefetch_score(self) -> npt.NDArray[np.float64]:
        return np.where(self._is_within[:, None], np.inf, self.score)

    def observe(self, layer: int, tokens_per_expert: npt.NDArray[np.int64]) -> None:
        self.passes[layer] += 1
        ran = tokens_per_expert / max(1, int(tokens_per_expert.sum()))
        if self._is_foreseen[layer]:
            ran = self._expected[layer]
        self._kept[layer] += SMOOTHING * (ran - self._kept[layer])
        self._is_foreseen[layer] = False
        self._layer = layer
        self._refresh()

    def observe_forecast(self, forecast: Forecast) -> None:
        """Entry 0 is each layer's next run; told again, the newest word counts."""
        layers = list(forecast.layers)
        self._expected[layers], self._is_foreseen[layers] = forecast.probabilities[0], True
        self._refresh()

    def restore(self, score: npt.NDArray[np.float64], passes: npt.NDArray[np.int64]) -> None:
        """As in the contract; scores count as what was kept, and nothing is foreseen."""
        super().restore(score, passes)
        self._kept[:] = score
        self._is_foreseen[:] = self._is_within[:] = False

    def recent(self) -> Lru:
        """For runs without forecasts: whatever is used from now on outranks what was not, and of the rest the
        share that was kept decides. One pass was observed."""
        assert self.passes.all(), "shares would outrank uses: no pass was observed"
        recent = Lru(*self.score.shape)
        recent.restore(self._kept, self.passes)
        return recent

    def resume(self, recent: Lru) -> None:
        """Go on from what `recent()` has seen since: each expert's last run, of those that ran alike."""
        num_runs = (recent.passes - self.passes)[:, None]
        is_used = recent.score > 1.0  # shares are not
        newest = recent.score.max(axis=1, keepdims=True)
        runs_ago = (newest - recent.score) / len(self.passes)
        num_alike = (recent.score == newest).sum(axis=1, keepdims=True)
        kept = self._kept * (1.0 - SMOOTHING) ** num_runs
        kept = np.where(is_used, SMOOTHING * (1.0 - SMOOTHING) ** runs_ago / num_alike, kept)
        self.restore(kept, recent.passes)

    def _refresh(self) -> None:
        num_layers = len(self.passes)
        near = (self._layer + np.arange(1, self._window + 1)) % num_layers  # nearest first
        self._is_within[:] = False
        self._is_within[near] = True
        self.score[:] = self._kept
        if not near.size:
            return
        expected = np.where(self._is_foreseen[near, None], self._expected[near], self._kept[near])
        priority = expected * self._decays
        self.score[near] = np.where(greatest(priority, self._size), REQUIRED, 0.0) + priority


def greatest(values: npt.NDArray[np.float64], count: int) -> npt.NDArray[np.bool_]:
    """Where the `count` greatest of `values` are; of equal ones the first."""
    flat = values.reshape(-1)
    if count >= flat.size:
        return np.ones(values.shape, dtype=np.bool_)
    least = np.partition(flat, -count)[-count]
    is_among: npt.NDArray[np.bool_] = flat > least
    is_among[(flat == least).nonzero()[0][: count - np.count_nonzero(is_among)]] = True
    return is_among.reshape(values.shape)
