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
        """Run `predictor` through the whole of `trace`. Raises ValueError where it asks for what the trace
        does not hold."""
        if predictor.asks_early and trace.early is None:
            raise ValueError("the trace does not hold what routers say when they are asked early")
        self.asks_early = predictor.asks_early
        self._forecasts: dict[tuple[int, int], Forecast | None] = {}
        self._known: dict[int, Forecast | None] = {}
        """By step: with its token known."""
        self._early: dict[tuple[int, int], Forecast | None] = {}
        self._last: Forecast | None = None
        begins = set(trace.bounds[:-1].tolist())
        for step in range(trace.num_tokens):
            if step in begins:
                predictor.reset()
            self._known[step] = predictor.begin_step(step, int(trace.tokens[step]))
            for layer in range(trace.num_layers):
                predictor.observe(step, layer, trace.logits[step, layer])
                self._forecasts[step, layer] = predictor.forecast()
                if trace.early is not None and self.asks_early and layer + 1 < trace.num_layers:
                    early = trace.early[step, layer + 1]
                    self._early[step, layer + 1] = predictor.observe_next(step, layer + 1, early)

    def begin_step(self, step: int, token: int) -> Forecast | None:
        return self._known[step]

    def observe(
        self,
        step: int,
        layer: int,
        router_logits: npt.NDArray[np.floating],
        hidden: npt.NDArray[np.floating] | None = None,
    ) -> None:
        self._last = self._forecasts[step, layer]

    def observe_next(self, step: int, layer: int, router_logits: npt.NDArray[np.floating]) -> Forecast | None:
        return self._early[step, layer]

    def forecast(self) -> Forecast | None:
        return self._last

    def reset(self) -> None:
        self._last = None
