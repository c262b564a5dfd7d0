"""A lookahead predictor comes back as it was written; what is none, or another model's, is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from hetero_runtime.errors import CheckpointError, DeviceError
from hetero_runtime.lookahead import read_lookahead_description
from hetero_runtime.lookahead.description import FORMAT
from hetero_runtime.lookahead.file import read_lookahead, write_lookahead
from hetero_runtime.prediction import RouterFingerprint
from hetero_scheduler.predict.lookahead_features import LookaheadShape
from hetero_scheduler.predict.lookahead_model import LookaheadWeights
from tests.runtime.foresight.predictors import random_lookahead

MODEL = RouterFingerprint(num_layers=4, num_experts=6, top_k=2, config_sha256="ab" * 32)


@pytest.fixture
def written() -> tuple[LookaheadWeights, LookaheadShape]:
    return random_lookahead(4, 6, hidden_size=8, visual_size=5, top_k=2)


@pytest.fixture
def path(tmp_path: Path, written: tuple[LookaheadWeights, LookaheadShape]) -> Path:
    path = tmp_path / "model.lookahead.safetensors"
    write_lookahead(path, *written, fingerprint=MODEL, semantic_depth=2, notes={"text": "a.txt"})
    return path


def test_round_trip(path: Path, written: tuple[LookaheadWeights, LookaheadShape]) -> None:
    weights, described = read_lookahead(path, MODEL)
    assert (described.shape, described.semantic_depth, described.notes) == (written[1], 2, {"text": "a.txt"})
    assert described == read_lookahead_description(path)
    assert described.num_bytes == 2 * sum(part.numel() for part in written[0])
    for ours, theirs in zip(weights, written[0], strict=True):
        assert ours.dtype == torch.float32
        assert torch.equal(ours, theirs.half().float())
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_another_models_is_refused(path: Path) -> None:
    other = replace(MODEL, config_sha256="cd" * 32)
    with pytest.raises(CheckpointError, match=r"made for another model.*Name this model's predictor"):
        read_lookahead(path, other)


def test_what_is_none_is_refused(path: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"none\.safetensors"):
        read_lookahead(tmp_path / "none.safetensors")
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(CheckpointError, match=r"cut\.safetensors"):
        read_lookahead(cut)
    other = tmp_path / "other.safetensors"
    save_file({"x": torch.zeros(2)}, other, {"format": "hetero_runtime.predictor/1"})
    with pytest.raises(
        CheckpointError, match=r"this version reads 'hetero_runtime\.lookahead/1'; make it with"
    ):
        read_lookahead(other)
    save_file({"x": torch.zeros(2)}, other, {"format": FORMAT})
    with pytest.raises(CheckpointError, match="metadata `lookahead` is incomplete"):
        read_lookahead(other)


def test_weights_that_are_not_what_the_file_says_are_refused(path: Path) -> None:
    tensors = load_file(path)
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    save_file({name: tensors[name] for name in list(tensors)[1:]}, path, metadata)
    with pytest.raises(CheckpointError, match="its weights are not whole"):
        read_lookahead(path)
    described = json.loads(metadata["lookahead"])
    described["shape"]["hidden_size"] = 9
    save_file(tensors, path, metadata | {"lookahead": json.dumps(described)})
    with pytest.raises(CheckpointError, match=r"inner is \[3, 44, 16\], and its sizes say \[3, 45, 16\]"):
        read_lookahead(path)


def test_a_folder_that_is_not_there_is_said(
    written: tuple[LookaheadWeights, LookaheadShape], tmp_path: Path
) -> None:
    with pytest.raises(DeviceError, match="cannot be written"):
        write_lookahead(
            tmp_path / "none" / "x.safetensors", *written, fingerprint=MODEL, semantic_depth=1, notes={}
        )
