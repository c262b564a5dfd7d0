"""Presets: named sets of fields. A field that the user writes beside a preset wins over it."""

from __future__ import annotations

from typing import Any

_LRU: dict[str, dict[str, Any]] = {
    "routing": {"policy": "exact"},
    "prediction": {"predictor": "frequency"},
    "prefetch": {"schedule": "popularity"},
    "eviction": {"policy": "lru"},
    "misses": {"handler": "load"},
    "execution": {"mode": "eager"},
}

_SEQMOE: dict[str, dict[str, Any]] = {
    "routing": {"policy": "exact"},
    "prediction": {"predictor": "mamba2"},
    "prefetch": {"schedule": "jsd", "extra": 3},
    "eviction": {"policy": "belady"},
    "misses": {"handler": "load"},
    "execution": {"mode": "eager"},
}

PRESETS: dict[str, dict[str, dict[str, Any]]] = {
    "lru": _LRU,
    "seqmoe": _SEQMOE,
    # The best set of fields that needs nothing trained for the model: lru so far.
    "auto": _LRU,
}
