"""Predictors: which experts will the coming steps use?"""

from __future__ import annotations

from hetero_scheduler.predict.base import Forecast, Predictor

__all__ = ["Forecast", "Predictor"]
