"""A predictor that says what a test wrote down."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from hetero_scheduler.predict import Forecast, Predictor


class Scripted(Predictor):
    """`script[pos] = (first_pos, {layer: expert})`: after the layer at `pos`, the layers named will use that
    expert at their run from `first_pos` on."""

    name = "scripted"

    def __init__(
        self, script: Mapping[int, tuple[int, dict[int, int]]], *, layers: int, experts: int
    ) -> None:
        self._script, self._num_layers, self._num_experts = script, layers, experts
        self._pos = -1
        self.num_resets = 0

    def observe(self, step: int, layer: int, router_logits: Any, hidden: Any = None) -> None:
        self._pos = step * self._num_layers + layer

    def forecast(self) -> Forecast | None:
        if self._pos not in self._script:
            return None
        first_pos, expected = self._script[self._pos]
        probabilities = np.zeros((1, len(expected), self._num_experts), dtype=np.float32)
        for row, expert in enumerate(expected.values()):
            probabilities[0, row, expert] = 0.9
        return Forecast(probabilities, tuple(expected), first_pos)

    def reset(self) -> None:
        self.num_resets += 1
