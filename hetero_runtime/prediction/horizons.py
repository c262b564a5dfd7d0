"""A stored predictor, ready to predict as near as one likes."""

from __future__ import annotations

from hetero_runtime.config.tree import Horizon
from hetero_runtime.prediction.file import StoredPredictor
from hetero_scheduler.predict import Predictor
from hetero_scheduler.predict.mamba2 import Mamba2Predictor
from hetero_scheduler.predict.refined import Refined


def predictors_of(stored: StoredPredictor, count: int, *, nearest: Horizon) -> list[Predictor]:
    """`count` predictors on the same weights, whose forecasts are made anew down to `nearest`.

    Raises ValueError for a horizon that `stored` has not learned.
    """
    first = Mamba2Predictor(stored.models)
    plain = [first, *(first.another() for _ in range(count - 1))]
    if nearest == "step":
        return list(plain)
    if stored.refinement is None:
        raise ValueError(f"this predictor has not learned the horizon {nearest}")
    return [Refined(each, stored.refinement, num_layers=first.num_layers, nearest=nearest) for each in plain]
