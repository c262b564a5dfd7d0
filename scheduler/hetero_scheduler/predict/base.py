"""The contract of a predictor: it watches routing and says which experts the coming steps will use."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from hetero_scheduler.trace import Trace

Probabilities = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Forecast:
    """What a predictor expects of `layers` at their next `horizon` runs.

    `probabilities`: `[horizon, len(layers), num_experts]`; entry 0 is the next run of each layer. They are
    shares: those of one layer and step sum to at most 1 (SeqMoE §5.2), so that layers compare. `layers`: the
    MoE layers covered, ascending. `first_pos`: pos = step · num_layers + layer of entry (0, 0), that is of
    the next run of `layers[0]`; all layers of one entry belong to the same step.
    """

    probabilities: Probabilities
    layers: tuple[int, ...]
    first_pos: int

    def __post_init__(self) -> None:
        """Raise ValueError when the parts do not fit together."""
        if self.probabilities.ndim != 3 or self.probabilities.shape[1] != len(self.layers):
            raise ValueError(f"probabilities {self.probabilities.shape} do not cover layers {self.layers}")
        if not self.layers or list(self.layers) != sorted(set(self.layers)):
            raise ValueError(f"layers {self.layers} are not ascending")

    @property
    def horizon(self) -> int:
        """Runs ahead that are covered, the next one included."""
        return int(self.probabilities.shape[0])

    def positions(self, num_layers: int) -> npt.NDArray[np.int64]:
        """The pos at which each entry is due, in a model of `num_layers` MoE layers. `[horizon, layers]`"""
        steps = np.arange(self.horizon, dtype=np.int64)[:, None] * num_layers
        return self.first_pos + steps + (np.array(self.layers, dtype=np.int64) - self.layers[0])


class Predictor(ABC):
    """What a step tells, in order; `forecast` after each call that has something to say:

    begin_step(step, token)     the token of the step is known
    observe(step, layer, …)     its router has decided, for every MoE layer
    observe_next(step, layer, …)    and the next layer's router was asked early, where `asks_early`
    """

    name: ClassVar[str]
    asks_early: bool = False
    """Whether it wants to hear the next layer's router on this layer's input."""

    @abstractmethod
    def observe(
        self,
        step: int,
        layer: int,
        router_logits: npt.NDArray[np.floating],
        hidden: npt.NDArray[np.floating] | None = None,
    ) -> None:
        """`layer` routed the token of `step`. Layers come in order 0..L-1, steps one after the other.

        `router_logits`: `[num_experts]`, before any normalisation. `hidden`: `[hidden_size]`, the input of
        the layer's experts, for a predictor that asks for it.
        """

    def begin_step(self, step: int, token: int) -> Forecast | None:
        """`token` is the id whose routing `step` will be; no layer has run yet. What that lets the predictor
        say anew; most look at routing alone and say nothing."""
        return None

    def observe_next(self, step: int, layer: int, router_logits: npt.NDArray[np.floating]) -> Forecast | None:
        """The router of `layer`, asked with the input of the layer before it, said `router_logits` `[E]`.
        What that lets the predictor say anew of `layer`."""
        return None

    @abstractmethod
    def forecast(self) -> Forecast | None:
        """What the last `observe` lets the predictor say anew; None when that layer triggers nothing.

        A query: asking twice gives the same answer and changes nothing.
        """

    @abstractmethod
    def reset(self) -> None:
        """A new document starts: forget the old one's routing; keep what was learned before."""

    def prefill(self, trace: Trace) -> tuple[Forecast, ...]:
        """Read a prompt's routing at once, after `reset`: what observing it step by step comes to.

        `trace`: one document, whose first token is step 0. Returns the forecasts of what follows its last.
        """
        forecasts = []
        for step in range(trace.num_tokens):
            self.begin_step(step, int(trace.tokens[step]))
            for layer in range(trace.num_layers):
                self.observe(step, layer, trace.logits[step, layer])
                if step == trace.num_tokens - 1 and (forecast := self.forecast()) is not None:
                    forecasts.append(forecast)
        return tuple(forecasts)
