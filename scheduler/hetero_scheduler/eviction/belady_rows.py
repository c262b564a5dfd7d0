"""Probabilistic Belady for several texts at once: an expert stays while any of them wants it."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import numpy.typing as npt

from hetero_scheduler.eviction.base import EvictionPolicy
from hetero_scheduler.eviction.belady_forecast import BeladyForecast
from hetero_scheduler.predict.base import Forecast


class BeladyRows(EvictionPolicy):
    """Each row has a window of its own over its forecasts (`BeladyForecast`); an expert's score is the
    greatest among the rows that are active. With one row this is that row's policy.

    A row that comes back begins with what its last text left behind, as the cache does.
    """

    name: ClassVar[str] = "belady"

    def __init__(self, num_layers: int, num_experts: int, *, num_rows: int) -> None:
        """Raises ValueError without a row."""
        super().__init__(num_layers, num_experts)
        if num_rows < 1:
            raise ValueError(f"num_rows is {num_rows}; at least 1 is needed")
        self._rows = [BeladyForecast(num_layers, num_experts) for _ in range(num_rows)]
        self._active = [0]
        self._current = 0
        self.score[:] = -np.inf

    def turn_to(self, row: int, *, active: list[int]) -> None:
        """What is observed from now on belongs to `row`; `active`: all rows under way, `row` among them."""
        assert row in active, f"row {row} is not among the active rows {active}"
        self._current = row
        if active != self._active:
            self._active = list(active)
            self._refresh(range(len(self.passes)))

    def observe(self, layer: int, tokens_per_expert: npt.NDArray[np.int64]) -> None:
        self.passes[layer] += 1
        self._rows[self._current].observe(layer, tokens_per_expert)
        self._refresh([layer])

    def observe_forecast(self, forecast: Forecast) -> None:
        self._rows[self._current].observe_forecast(forecast)
        self._refresh(forecast.layers)

    def restore(self, score: npt.NDArray[np.float64], passes: npt.NDArray[np.int64]) -> None:
        """As in the contract; every row begins with the scores that all had together."""
        super().restore(score, passes)
        for row in self._rows:
            row.restore(score, passes)

    def _refresh(self, layers: range | list[int] | tuple[int, ...]) -> None:
        for layer in layers:
            first, *others = (self._rows[row].score[layer] for row in self._active)
            self.score[layer] = first
            for score in others:
                np.maximum(self.score[layer], score, out=self.score[layer])
