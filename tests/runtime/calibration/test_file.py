"""A calibration comes back as it was written; what is none, or another model's, is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from hetero_runtime.calibration import (
    locate_calibration,
    locate_profile,
    read_calibration,
    write_calibration,
)
from hetero_runtime.calibration.profile import profiled_popularity
from hetero_runtime.config.tree import PrefetchConfig, RoutingConfig
from hetero_runtime.errors import CheckpointError, ConfigError
from hetero_runtime.plan import read_geometry
from hetero_runtime.prediction import RouterFingerprint
from hetero_scheduler.routing import Shape
from hetero_scheduler.routing.calibration import uncalibrated
from tests.runtime.calibration.calibrations import random_calibration, write_random_calibration
from tests.sparse_checkpoint import write_qwen3

MODEL = RouterFingerprint(3, 8, 2, "ab" * 32)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "calibration.safetensors"
    write_calibration(path, random_calibration(3, 8), fingerprint=MODEL, notes={"text": "a.txt"})
    return path


def test_it_comes_back_as_it_was_written(path: Path) -> None:
    stored, written = read_calibration(path, MODEL), random_calibration(3, 8)
    assert stored.notes == {"text": "a.txt"}
    for found, expected in (
        (stored.calibration.score_range, written.score_range),
        (stored.calibration.uses, written.uses),
        (stored.calibration.prior.tokens, written.prior.tokens),
        (stored.calibration.prior.share, written.prior.share),
    ):
        np.testing.assert_array_equal(found, expected)
        assert found.dtype == expected.dtype


def test_another_models_is_refused(path: Path) -> None:
    other = replace(MODEL, config_sha256="cd" * 32)
    with pytest.raises(CheckpointError, match=r"made for another model.*Name this model's calibration"):
        read_calibration(path, other)


def test_what_is_no_calibration_is_refused(path: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"none\.safetensors"):
        read_calibration(tmp_path / "none.safetensors")
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"cut\.safetensors"):
        read_calibration(cut)
    other = tmp_path / "other.safetensors"
    save_file({"x": np.zeros(2)}, other, {"format": "hetero_runtime.predictor/1"})
    with pytest.raises(CheckpointError, match=r"version reads 'hetero_runtime\.calibration/1'; calibrate"):
        read_calibration(other)
    save_file({"x": np.zeros(2)}, other, {"format": "hetero_runtime.calibration/1"})
    with pytest.raises(CheckpointError, match="is incomplete"):
        read_calibration(other)


def test_it_is_looked_for_beside_the_model(tmp_path: Path) -> None:
    geometry = read_geometry(write_qwen3(tmp_path / "model"))
    psr = RoutingConfig(policy="psr")
    assert locate_calibration(RoutingConfig(), geometry) is None
    with pytest.raises(ConfigError, match=r"model\.calibration\.safetensors does not exist; calibrate with"):
        locate_calibration(psr, geometry)
    written = write_random_calibration(geometry.path)
    assert locate_calibration(psr, geometry) == written == tmp_path / "model.calibration.safetensors"
    named = tmp_path / "mine.safetensors"
    write_calibration(named, random_calibration(3, 8), fingerprint=MODEL, notes={})
    with pytest.raises(CheckpointError, match="another model"):
        locate_calibration(replace(psr, calibration=str(named)), geometry)


def test_a_profile_is_taken_where_there_is_one_of_this_model(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    geometry, auto = read_geometry(write_qwen3(tmp_path / "model")), PrefetchConfig()
    assert locate_profile(auto, geometry) is None
    named = replace(auto, popularity=str(tmp_path / "mine.safetensors"))
    with pytest.raises(ConfigError, match=r"prefetch\.popularity: .*mine\.safetensors does not exist"):
        locate_profile(named, geometry)
    beside = write_random_calibration(geometry.path)
    assert locate_profile(auto, geometry) == beside
    assert locate_profile(replace(auto, popularity="none"), geometry) is None
    assert locate_profile(replace(auto, schedule="none"), geometry) is None
    assert not caplog.records
    for path in (beside, Path(named.popularity)):
        write_calibration(path, random_calibration(3, 8), fingerprint=MODEL, notes={})
    assert locate_profile(auto, geometry) is None
    assert "without a profile" in caplog.text and "another model" in caplog.text
    with pytest.raises(CheckpointError, match="another model"):
        locate_profile(named, geometry)


def test_counts_begin_with_the_profile(path: Path) -> None:
    named = PrefetchConfig(popularity=str(path))
    popularity = profiled_popularity(named, num_layers=3, num_experts=8, top_k=2)
    uses = random_calibration(3, 8).uses
    np.testing.assert_allclose(
        popularity.counts / popularity.counts.sum(axis=1, keepdims=True),
        uses / uses.sum(axis=1, keepdims=True),
    )
    nothing = profiled_popularity(replace(named, popularity="none"), num_layers=3, num_experts=8, top_k=2)
    assert not nothing.counts.any()


def test_a_calibration_that_saw_no_text_is_no_profile(path: Path) -> None:
    write_calibration(path, uncalibrated(Shape(3, 8, 2)), fingerprint=MODEL, notes={})
    with pytest.raises(CheckpointError, match=r"layer 0 of the profile has no uses; calibrate with"):
        profiled_popularity(PrefetchConfig(popularity=str(path)), num_layers=3, num_experts=8, top_k=2)
