"""Forecasts made once and replayed many times."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hetero_scheduler.predict import Forecast, Predictor
from hetero_scheduler.trace import Trace


class Foreseen(Predictor):
    """What `predictor` says all along `trace`, remembered: it never depends on the cache, so a sweep need not
    ask again for each scenario. Takes tokens × layers × horizon × experts × 4 bytes."""

    name = "foreseen"

    def __init__(self, predictor: Predictor, trace: Trace) -> None:
        """Run `predictor` through the whole of `trace`."""
        self._forecasts: dict[tuple[int, int], Forecast] = {}
        self._last: Forecast | None = None
        begins = set(trace.bounds[:-1].tolist())
        for step in range(trace.num_tokens):
            if step in begins:
                predictor.reset()
            for layer in range(trace.num_layers):
                predictor.observe(step, layer, trace.logits[step, layer])
                forecast = predictor.forecast()
                if forecast is not None:
                    self._forecasts[step, layer] = forecast

    def observe(
        self,
        step: int,
        layer: int,
        router_logits: npt.NDArray[np.floating],
        hidden: npt.NDArray[np.floating] | None = None,
    ) -> None:
        self._last = self._forecasts.get((step, layer))

    def forecast(self) -> Forecast | None:
        return self._last

    def reset(self) -> None:
        self._last = None
