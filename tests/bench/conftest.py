"""A toy checkpoint of random weights, and a recorded routing that fits it."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from bench.models.random_checkpoint import ensure_checkpoint
from bench.models.random_geometry import RandomGeometry
from bench.routing import RecordedRouting
from tests.bench.toy_geometry import TINY


@pytest.fixture(scope="session")
def geometry() -> RandomGeometry:
    return replace(TINY, experts=16)


@pytest.fixture(scope="session")
def geometry_words(geometry: RandomGeometry) -> list[str]:
    """That geometry on a command line."""
    return [f"--{name.replace('_', '-')}={size}" for name, size in asdict(geometry).items()]


@pytest.fixture(scope="session")
def checkpoint(geometry: RandomGeometry, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ensure_checkpoint(tmp_path_factory.mktemp("checkpoint"), geometry)


@pytest.fixture(scope="session")
def routing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two streams of top-1 of 8: together top-2 of 16."""
    path = tmp_path_factory.mktemp("routing") / "routing.safetensors"
    draw = np.random.default_rng(0)
    RecordedRouting(draw.integers(0, 8, (2, 120, 2, 1)), 8, "random").save(path)
    return path
