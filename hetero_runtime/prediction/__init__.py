"""Trained predictors on disk."""

from __future__ import annotations

from hetero_runtime.prediction.file import StoredPredictor, read_predictor, write_predictor
from hetero_runtime.prediction.fingerprint import RouterFingerprint

__all__ = ["RouterFingerprint", "StoredPredictor", "read_predictor", "write_predictor"]
