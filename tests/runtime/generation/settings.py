"""What requests may ask of sampling, for both samplers."""

from __future__ import annotations

from typing import Any

VOCAB = 97
HISTORY = [3, 5, 5, 8, 96]
SETTINGS: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.3},
    {"temperature": 1.0, "repetition_penalty": 1.3},
    {"temperature": 1.0, "repetition_penalty": 0.8},
    {"temperature": 0.7, "top_k": 1},
    {"temperature": 0.7, "top_k": 10_000},
    {"temperature": 2.0, "top_p": 0.9},
    {"temperature": 2.0, "top_p": 1e-6},
    {"temperature": 1.5, "min_p": 0.2},
    {"temperature": 1.5, "min_p": 1.0},
    {"temperature": 0.9, "top_k": 20, "top_p": 0.8, "min_p": 0.05, "repetition_penalty": 1.1},
]
