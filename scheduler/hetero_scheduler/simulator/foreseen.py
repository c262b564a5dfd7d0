"""Forecasts made once and replayed many times."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hetero_scheduler.predict import Forecast, Predictor
from hetero_scheduler.predict.base import Probabilities
from hetero_scheduler.trace import Trace


class Foreseen(Predictor):
    """What `predictor` says all along `trace`, remembered: it never depends on the cache, so a sweep need not
    ask again for each scenario.

    `steps` `[tokens, horizon, layers, experts]`: what is expected after each step, entry 0 of the one after
    it. `groups`: layers that are forecast together, once the last of them has routed. `known`, `early`
    `[tokens, layers, experts]`: what is expected of a step itself once its token is known, and of each layer
    once its router was asked early; None for a predictor that does not say. All float32.
    """

    name = "foreseen"
    known: Probabilities | None = None
    early: Probabilities | None = None

    def __init__(self, predictor: Predictor, trace: Trace) -> None:
        """Run `predictor` through the whole of `trace`. Raises ValueError where it asks for what the trace
        does not hold, and where it does not forecast all layers, group by group."""
        if predictor.asks_early and trace.early is None:
            raise ValueError("the trace does not hold what routers say when they are asked early")
        self.asks_early = predictor.asks_early
        self._num_layers = trace.num_layers
        self._shape = (trace.num_tokens, trace.num_layers, trace.num_experts)
        self._group_of: dict[int, range] = {}
        """By last layer."""
        self.is_first = np.isin(np.arange(trace.num_tokens), trace.bounds[:-1])
        """Whether a step is the first of its document. `[tokens]`"""
        for step in range(trace.num_tokens):
            if self.is_first[step]:
                predictor.reset()
            self._listen(predictor, trace, step)
        self.groups = tuple(sorted(self._group_of.values(), key=lambda group: group.start))
        covered = [layer for group in self.groups for layer in group]
        if covered != list(range(trace.num_layers)):
            raise ValueError(f"{predictor.name} forecasts layers {covered} of {trace.num_layers}")
        self._last: Forecast | None = None

    def _listen(self, predictor: Predictor, trace: Trace, step: int) -> None:
        """One step of the trace."""
        known = predictor.begin_step(step, int(trace.tokens[step]))
        if known is not None:
            if self.known is None:
                self.known = np.zeros(self._shape, np.float32)
            self.known[step] = known.probabilities[0]
        for layer in range(trace.num_layers):
            predictor.observe(step, layer, trace.logits[step, layer])
            forecast = predictor.forecast()
            if forecast is not None:
                self._remember(step, layer, forecast)
            if self.asks_early and trace.early is not None and layer + 1 < trace.num_layers:
                early = predictor.observe_next(step, layer + 1, trace.early[step, layer + 1])
                if early is not None:
                    if self.early is None:
                        self.early = np.zeros(self._shape, np.float32)
                    self.early[step, layer + 1] = early.probabilities[0, 0]

    def _remember(self, step: int, layer: int, forecast: Forecast) -> None:
        group = range(forecast.layers[0], forecast.layers[-1] + 1)
        if not self._group_of:
            num_tokens, num_layers, num_experts = self._shape
            self.steps = np.zeros((num_tokens, forecast.horizon, num_layers, num_experts), np.float32)
        if layer != group.stop - 1 or self._group_of.setdefault(layer, group) != group:
            raise ValueError(
                f"after layer {layer} came a forecast of layers {group.start} to {group.stop - 1}"
            )
        self.steps[step, :, group.start : group.stop] = forecast.probabilities

    # ---- the predictor again

    def begin_step(self, step: int, token: int) -> Forecast | None:
        if self.known is None or self.is_first[step]:
            return None
        return self._refined(step, self.known[step], range(self._num_layers))

    def observe(
        self,
        step: int,
        layer: int,
        router_logits: npt.NDArray[np.floating],
        hidden: npt.NDArray[np.floating] | None = None,
    ) -> None:
        self._last, group = None, self._group_of.get(layer)
        if group is not None:
            first_pos = (step + 1) * self._num_layers + group.start
            self._last = Forecast(self.steps[step, :, group.start : group.stop], tuple(group), first_pos)

    def observe_next(self, step: int, layer: int, router_logits: npt.NDArray[np.floating]) -> Forecast | None:
        if self.early is None or self.is_first[step]:
            return None
        return self._refined(step, self.early[step, layer : layer + 1], range(layer, layer + 1))

    def forecast(self) -> Forecast | None:
        return self._last

    def reset(self) -> None:
        self._last = None

    def _refined(self, step: int, now: Probabilities, layers: range) -> Forecast:
        """`now` `[layers, experts]` in place of what the step before expected of this one."""
        later = self.steps[step - 1, 1:, layers.start : layers.stop]
        return Forecast(
            np.concatenate([now[None], later]), tuple(layers), step * self._num_layers + layers.start
        )
