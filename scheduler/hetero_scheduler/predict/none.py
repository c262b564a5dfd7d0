"""No prediction."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hetero_scheduler.predict.base import Forecast, Predictor


class NoPredictor(Predictor):
    """Never forecasts: the cache alone decides, which is what every predictor is measured against."""

    name = "none"

    def observe(
        self,
        step: int,
        layer: int,
        router_logits: npt.NDArray[np.floating],
        hidden: npt.NDArray[np.floating] | None = None,
    ) -> None:
        """Nothing is remembered."""

    def forecast(self) -> Forecast | None:
        return None

    def reset(self) -> None:
        """Nothing was remembered."""
