"""Presets: named sets of fields. A field that the user writes beside a preset wins over it."""

from __future__ import annotations

from typing import Any

_LRU: dict[str, dict[str, Any]] = {
    "routing": {"policy": "exact"},
    "prediction": {"predictor": "frequency"},
    "prefetch": {"schedule": "popularity"},
    "eviction": {"policy": "lru"},
    "misses": {"handler": "load"},
    "execution": {"mode": "auto"},
}

_SEQMOE: dict[str, dict[str, Any]] = {
    "routing": {"policy": "exact"},
    "prediction": {"predictor": "mamba2"},
    "prefetch": {"schedule": "jsd", "extra": 3},
    "eviction": {"policy": "belady"},
    "misses": {"handler": "load"},
    "execution": {"mode": "auto"},
}

_PSR: dict[str, dict[str, Any]] = {
    "memory": {"pool": "per_layer"},
    "routing": {"policy": "psr", "bonus": 0.2, "insertions": 1, "window": 2},
    "prediction": {"predictor": "none"},
    "prefetch": {"schedule": "bounded", "in_flight": 2},
    "eviction": {"policy": "logical"},
    "misses": {"handler": "load"},
    "execution": {"mode": "auto"},
}

_VISMMOE: dict[str, dict[str, Any]] = {
    "memory": {"pinned_prefix": "auto"},
    "routing": {"policy": "exact"},
    "prediction": {"predictor": "lookahead_mlp"},
    # W, gamma and B are top_b's own; a layer offers up to B experts where top-k is 8
    "prefetch": {"schedule": "top_b", "extra": 12},
    "eviction": {"policy": "lookahead"},
    "misses": {"handler": "load"},
    "execution": {"mode": "auto"},
    # half of an image's tokens, for a model that sees
    "vision": {"keep_ratio": "auto"},
}

PRESETS: dict[str, dict[str, dict[str, Any]]] = {
    "lru": _LRU,
    "seqmoe": _SEQMOE,
    "psr": _PSR,
    "vismmoe": _VISMMOE,
    # What holds where nothing is measured; hetero_runtime.tuning lays alternatives over it.
    "auto": _LRU,
}
