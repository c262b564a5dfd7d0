"""Trained predictors on disk.

The face is lazy: a memory plan asks for a predictor's size and model, and needs no torch for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hetero_runtime.prediction.file import StoredPredictor, read_predictor, write_predictor
    from hetero_runtime.prediction.fingerprint import RouterFingerprint

__all__ = ["RouterFingerprint", "StoredPredictor", "read_predictor", "write_predictor"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    home = "fingerprint" if name == "RouterFingerprint" else "file"
    return getattr(import_module(f"{__name__}.{home}"), name)
