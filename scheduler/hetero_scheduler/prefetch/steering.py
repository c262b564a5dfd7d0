"""From a forecast to transfers: what engine and simulator do alike with a predictor's word."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from hetero_scheduler.eviction.base import EvictionPolicy
from hetero_scheduler.predict.base import Forecast
from hetero_scheduler.prefetch.base import Schedule, Task
from hetero_scheduler.prefetch.propose import propose


class Steering:
    """Tells schedule and eviction policy of forecasts, and asks the schedule what the link carries next.

    `schedule`: None prefetches nothing. `per_layer`: tasks of a layer, the router's top-k and some extra.
    `is_shared`: whether all layers use the same slots.
    """

    def __init__(
        self,
        schedule: Schedule | None,
        eviction: EvictionPolicy,
        *,
        num_layers: int,
        per_layer: int,
        is_shared: bool,
    ) -> None:
        self.schedule, self.eviction = schedule, eviction
        self._num_layers, self._per_layer, self.is_shared = num_layers, per_layer, is_shared

    def take(self, forecast: Forecast) -> None:
        """A forecast arrived: its tasks become candidates, its shares become scores."""
        if self.schedule is not None:
            self.schedule.update(propose(forecast, num_layers=self._num_layers, per_layer=self._per_layer))
        self.eviction.observe_forecast(forecast)

    def next(
        self, pos: int, *, is_present: npt.NDArray[np.bool_], has_slots: Callable[[int], bool]
    ) -> Task | None:
        """The transfer to start now; None when there is none. `pos`, `is_present`: as for `Schedule.next`.

        `has_slots`: whether a prefetch for that layer leaves slots enough for a layer to run. A task whose
        layer has none is dropped; while a shared pool has none, all tasks wait.
        """
        if self.schedule is None or (self.is_shared and not has_slots(0)):
            return None
        while True:
            task = self.schedule.next(pos, is_present)
            if task is None or has_slots(task.key.layer):
                return task

    def clear(self) -> None:
        """A new document, alone: no task of the old one is worth anything."""
        if self.schedule is not None:
            self.schedule.clear()
