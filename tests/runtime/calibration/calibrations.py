"""Calibrations of nothing: right shapes, random numbers, for a model whose routing is under test."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from hetero_runtime.beside_model import beside
from hetero_runtime.calibration import CALIBRATION_SUFFIX, write_calibration
from hetero_runtime.plan import read_geometry
from hetero_runtime.prediction import RouterFingerprint
from hetero_scheduler.routing import Calibration, TokenPrior


def random_calibration(num_layers: int, num_experts: int, *, vocab: int = 64, seed: int = 0) -> Calibration:
    rng = np.random.default_rng(seed)
    share = rng.integers(0, 256, (vocab + 1, num_layers, num_experts)).astype(np.uint8)
    share[-1] = 0
    prior = TokenPrior(np.arange(vocab), share)
    return Calibration(
        rng.uniform(0.5, 3, num_layers), rng.integers(1, 99, (num_layers, num_experts)).astype(float), prior
    )


def write_random_calibration(folder: Path) -> Path:
    """Beside the model in `folder`, for it."""
    geometry = read_geometry(folder)
    path = beside(folder, CALIBRATION_SUFFIX)
    write_calibration(
        path,
        random_calibration(geometry.num_moe_layers, geometry.num_experts),
        fingerprint=RouterFingerprint.of_model(geometry),
        notes={"text": "none"},
    )
    return path
