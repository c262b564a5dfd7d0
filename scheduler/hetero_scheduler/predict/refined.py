"""Forecasts that are made anew whenever more is known of a step."""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np
import numpy.typing as npt

from hetero_scheduler.predict.base import Forecast, Predictor, Probabilities
from hetero_scheduler.predict.refinement import Refinement
from hetero_scheduler.trace import Trace

Horizons = Literal["token", "layer"]
"""How near forecasts are refined: when the token is known, or down to one layer ahead."""


class Refined(Predictor):
    """`predictor`'s forecasts, and those of the step that runs made anew by `refinement`.

    Refined entries stand for the run at hand; what the forecast says of later ones stays as it was. Before
    a layer has a forecast there is nothing to refine, and nothing is said.
    """

    name: ClassVar[str] = "refined"

    def __init__(
        self, predictor: Predictor, refinement: Refinement, *, num_layers: int, nearest: Horizons
    ) -> None:
        """Raise ValueError where `refinement` is of another model or cannot look as near as `nearest`."""
        if len(refinement.scale) != num_layers or (nearest == "layer" and refinement.pool is None):
            raise ValueError(
                f"a refinement of {len(refinement.scale)} layers, for the {nearest} horizon of {num_layers}"
            )
        self.predictor, self.refinement, self._num_layers = predictor, refinement, num_layers
        self.asks_early = nearest == "layer"
        self._ahead: dict[int, Probabilities] = {}
        """By layer: what is expected of its coming runs. `[horizon, E]`"""

    def begin_step(self, step: int, token: int) -> Forecast | None:
        if len(self._ahead) < self._num_layers:
            return None
        layers = range(self._num_layers)
        ahead = np.stack([self._ahead[layer] for layer in layers], axis=1)  # [horizon, L, E]
        ahead[0] = self.refinement.with_tokens(ahead[0], np.array(token))
        return self._kept(Forecast(ahead, tuple(layers), step * self._num_layers))

    def observe(
        self,
        step: int,
        layer: int,
        router_logits: npt.NDArray[np.floating],
        hidden: npt.NDArray[np.floating] | None = None,
    ) -> None:
        self.predictor.observe(step, layer, router_logits, hidden)
        forecast = self.predictor.forecast()
        if forecast is not None:
            self._kept(forecast)

    def observe_next(self, step: int, layer: int, router_logits: npt.NDArray[np.floating]) -> Forecast | None:
        if layer not in self._ahead:
            return None
        ahead = self._ahead[layer].copy()
        ahead[:1] = self.refinement.with_next_router(ahead[:1], router_logits[None], slice(layer, layer + 1))
        return self._kept(Forecast(ahead[:, None], (layer,), step * self._num_layers + layer))

    def forecast(self) -> Forecast | None:
        return self.predictor.forecast()

    def reset(self) -> None:
        self.predictor.reset()
        self._ahead.clear()

    def prefill(self, trace: Trace) -> tuple[Forecast, ...]:
        forecasts = self.predictor.prefill(trace)
        for forecast in forecasts:
            self._kept(forecast)
        return forecasts

    def _kept(self, forecast: Forecast) -> Forecast:
        for index, layer in enumerate(forecast.layers):
            self._ahead[layer] = forecast.probabilities[:, index]
        return forecast
