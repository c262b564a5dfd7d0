"""A predictor comes back as it was written; what is no predictor, or another model's, is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from hetero_runtime.config.tree import Horizon
from hetero_runtime.errors import CheckpointError, DeviceError
from hetero_runtime.prediction import RouterFingerprint, read_predictor, write_predictor
from hetero_runtime.prediction.description import read_description
from hetero_runtime.prediction.file import FORMAT
from hetero_runtime.prediction.horizons import predictors_of
from hetero_scheduler.predict.mamba2_block import Mamba2Sizes
from hetero_scheduler.predict.mamba2_model import GroupModel, GroupShape
from hetero_scheduler.predict.refined import Refined
from tests.runtime.foresight.predictors import random_refinement

FINGERPRINT = RouterFingerprint(num_layers=3, num_experts=6, top_k=2, config_sha256="ab" * 32)
SIZES = Mamba2Sizes(d_model=16, state_size=8, head_dim=8)


@pytest.fixture
def models() -> list[GroupModel]:
    torch.manual_seed(0)
    return [GroupModel(GroupShape(layers, 6, 2, sizes=SIZES)) for layers in (2, 1)]


@pytest.fixture
def path(tmp_path: Path, models: list[GroupModel]) -> Path:
    path = tmp_path / "predictor.safetensors"
    write_predictor(path, models, fingerprint=FINGERPRINT, notes={"trace": "held-out text"})
    return path


def test_round_trip(path: Path, models: list[GroupModel]) -> None:
    stored = read_predictor(path, FINGERPRINT)
    assert stored.fingerprint == FINGERPRINT
    assert stored.notes == {"trace": "held-out text"}
    assert [model.shape for model in stored.models] == [model.shape for model in models]
    for read, written in zip(stored.models, models, strict=True):
        for name, tensor in written.state_dict().items():
            assert torch.equal(read.state_dict()[name], tensor), name
    assert [file.name for file in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize(
    ("has_pool", "horizons"), [(True, ("step", "token", "layer")), (False, ("step", "token"))]
)
def test_a_refinement_comes_back_too(
    path: Path, models: list[GroupModel], has_pool: bool, horizons: tuple[Horizon, ...]
) -> None:
    written = random_refinement(3, 6)
    if not has_pool:
        written = replace(written, pool=None)
    write_predictor(path, models, fingerprint=FINGERPRINT, notes={}, refinement=written)
    read = read_predictor(path).refinement
    for name, part in vars(written).items():
        np.testing.assert_array_equal(getattr(read, name), part, err_msg=name)
    assert read_description(path).horizons == horizons
    predictors = predictors_of(read_predictor(path), 2, nearest=horizons[-1])
    assert [type(predictor) for predictor in predictors] == [Refined, Refined]


def test_a_predictor_without_a_refinement_looks_a_step_ahead(path: Path) -> None:
    assert read_description(path).horizons == ("step",)
    with pytest.raises(ValueError, match="has not learned the horizon token"):
        predictors_of(read_predictor(path), 1, nearest="token")


def test_half_a_refinement_is_refused(path: Path, models: list[GroupModel]) -> None:
    write_predictor(path, models, fingerprint=FINGERPRINT, notes={}, refinement=random_refinement(3, 6))
    tensors = load_file(path)
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    del tensors["refinement.bias"]
    save_file(tensors, path, metadata=metadata)
    with pytest.raises(CheckpointError, match=r"its refinement is not whole.*train it anew"):
        read_predictor(path)


def test_whoever_may_read_other_files_may_read_it(path: Path) -> None:
    other = path.with_name("other")
    other.touch()
    assert path.stat().st_mode == other.stat().st_mode


@pytest.mark.parametrize(
    "change", [{"config_sha256": "cd" * 32}, {"num_layers": 4}, {"num_experts": 8}, {"top_k": 1}], ids=str
)
def test_a_predictor_of_another_model_is_refused(path: Path, change: dict[str, int]) -> None:
    with pytest.raises(CheckpointError, match=r"another model \(3 layers × 6 experts, top-2.*Train one with"):
        read_predictor(path, replace(FINGERPRINT, **change))


def test_a_missing_or_truncated_file_is_refused(path: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere"):
        read_predictor(path.with_name("nowhere.safetensors"))
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(CheckpointError, match=path.name):
        read_predictor(path)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        (None, "format is None"),
        ({"format": FORMAT}, "incomplete"),
        ({"format": FORMAT, "predictor": json.dumps({"fingerprint": {"num_layers": 3}})}, "incomplete"),
    ],
)
def test_a_file_that_is_no_predictor_is_refused(
    path: Path, metadata: dict[str, str] | None, message: str
) -> None:
    save_file(load_file(path), path, metadata=metadata)
    with pytest.raises(CheckpointError, match=message):
        read_predictor(path)


def test_weights_that_do_not_fit_are_refused(path: Path, models: list[GroupModel]) -> None:
    models[1] = GroupModel(replace(models[1].shape, num_blocks=1))
    models[1].shape = replace(models[1].shape, num_blocks=2)
    write_predictor(path, models, fingerprint=FINGERPRINT, notes={})
    with pytest.raises(CheckpointError, match="weights of group 1 do not fit"):
        read_predictor(path)


def test_a_place_that_cannot_be_written_is_named(models: list[GroupModel], tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match="cannot be written"):
        write_predictor(tmp_path / "no folder" / "p.safetensors", models, fingerprint=FINGERPRINT, notes={})
