"""Predictors that speak of whole steps, one group of layers at a time."""

from __future__ import annotations

from abc import abstractmethod

import numpy as np
import numpy.typing as npt

from hetero_scheduler.predict.base import Forecast, Predictor, Probabilities
from hetero_scheduler.predict.routing import RouterShape, layer_groups


class NextStepPredictor(Predictor):
    """When the last layer of a group has routed step i, the group's layers are forecast from step i+1 on.

        step i     |  group 0  |  group 1  |
                               ↑           ↑ forecasts layers of group 1 at i+1 .. i+horizon
                               forecasts layers of group 0 at i+1 .. i+horizon

    Two groups are the paper's default (SeqMoE §5.1, triggers after L/2 and L layers): the more of them, the
    longer the time until the first deadline. `horizon` 9: one step for prefetch and eight beyond it.
    """

    def __init__(self, shape: RouterShape, *, horizon: int = 9, num_groups: int = 2) -> None:
        """Raises ValueError when `horizon` is not positive or there are more groups than layers."""
        if horizon < 1:
            raise ValueError(f"horizon is {horizon}; at least 1 step is needed")
        self.shape, self.horizon = shape, horizon
        groups = layer_groups(shape.num_layers, num_groups)
        self._group_of_last = {group.stop - 1: group for group in groups}
        self._step = self._layer = -1

    def observe(
        self,
        step: int,
        layer: int,
        router_logits: npt.NDArray[np.floating],
        hidden: npt.NDArray[np.floating] | None = None,
    ) -> None:
        self._step, self._layer = step, layer
        self._record(step, layer, router_logits)

    def forecast(self) -> Forecast | None:
        group = self._group_of_last.get(self._layer)
        if group is None:
            return None
        first_pos = (self._step + 1) * self.shape.num_layers + group.start
        return Forecast(self._expect(self._step, group), tuple(group), first_pos)

    def reset(self) -> None:
        self._step = self._layer = -1

    @abstractmethod
    def _record(self, step: int, layer: int, router_logits: npt.NDArray[np.floating]) -> None:
        """Remember what `layer` routed at `step`."""

    @abstractmethod
    def _expect(self, step: int, group: range) -> Probabilities:
        """Shares of the group's experts at steps `step + 1` and on; those of one layer sum to at most 1.
        `[horizon, layers, E]`"""
