"""Model folders: one file, shards with an index, and what is said when something is missing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from hetero_runtime.checkpoint import Checkpoint
from hetero_runtime.errors import CheckpointError

INDEX = "model.safetensors.index.json"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two shards, an index and a config."""
    save_file({"a": torch.zeros(2), "b": torch.ones(3)}, tmp_path / "one.safetensors")
    save_file({"c": torch.zeros(4)}, tmp_path / "two.safetensors")
    index = {"weight_map": {"a": "one.safetensors", "b": "one.safetensors", "c": "two.safetensors"}}
    (tmp_path / INDEX).write_text(json.dumps(index))
    (tmp_path / "config.json").write_text('{"model_type": "tiny"}')
    return tmp_path


def test_shards_are_read_by_their_index(folder: Path) -> None:
    checkpoint = Checkpoint.open(folder)
    assert set(checkpoint.entries) == {"a", "b", "c"}
    assert checkpoint.entries["c"].file.name == "two.safetensors"
    assert checkpoint.num_bytes == 4 * 9
    assert checkpoint.config == {"model_type": "tiny"}


def test_without_an_index_every_file_is_read(folder: Path) -> None:
    (folder / INDEX).unlink()
    assert set(Checkpoint.open(str(folder)).entries) == {"a", "b", "c"}


def test_a_missing_shard_is_named(folder: Path) -> None:
    (folder / "two.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"1 of 2 shards that .* lists are missing: two.safetensors"):
        Checkpoint.open(folder)


def test_a_tensor_that_only_the_index_knows_is_named(folder: Path) -> None:
    index = {"weight_map": {"a": "one.safetensors", "d": "two.safetensors"}}
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"two.safetensors: has no 'd'"):
        Checkpoint.open(folder)


@pytest.mark.parametrize("content", ["{}", '{"weight_map": {"a": 1}}'])
def test_an_index_without_a_map_is_refused(content: str, folder: Path) -> None:
    (folder / INDEX).write_text(content)
    with pytest.raises(CheckpointError, match="has no weight_map"):
        Checkpoint.open(folder)


def test_two_files_with_one_tensor_need_an_index(folder: Path) -> None:
    (folder / INDEX).unlink()
    save_file({"a": torch.zeros(2)}, folder / "three.safetensors")
    with pytest.raises(CheckpointError, match=r"'a' is in both one.safetensors and three.safetensors"):
        Checkpoint.open(folder)


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no such folder; model.path must name"):
        Checkpoint.open(tmp_path / "none")


def test_a_folder_without_config(folder: Path) -> None:
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config.json: cannot be read .* is this a model folder"):
        Checkpoint.open(folder)


@pytest.mark.parametrize(("content", "message"), [("{", "is not JSON"), ("[]", "is not a JSON object")])
def test_a_config_that_is_no_json_object(content: str, message: str, folder: Path) -> None:
    (folder / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=f"config.json: {message}"):
        Checkpoint.open(folder)


def test_a_folder_of_pickles_is_not_read(folder: Path) -> None:
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    torch.save({}, folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"only safetensors is read \(never pickle\)"):
        Checkpoint.open(folder)
