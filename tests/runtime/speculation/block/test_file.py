"""Checkpoints of block drafters: DFlash's config, what is refused, there and back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hetero_runtime.errors import CheckpointError
from hetero_runtime.speculation.block.file import read_network, write_network
from hetero_runtime.speculation.block.network import BlockNetwork
from hetero_runtime.speculation.block.shape import as_config, read_shape
from tests.runtime.speculation.block.shapes import tiny_shape

CPU = torch.device("cpu")
PUBLISHED: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "attention_bias": False,
    "block_size": 16,
    "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]},
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "layer_types": ["full_attention"] * 5,
    "max_position_embeddings": 40960,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 5,
    "num_key_value_heads": 8,
    "num_target_layers": 36,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
"""Laid out as DFlash's checkpoint for Qwen3-8B."""


def test_a_published_config_is_understood() -> None:
    shape = read_shape(Path("folder"), PUBLISHED)
    assert shape.target_layers == (1, 9, 17, 25, 33)
    assert (shape.num_layers, shape.block, shape.mask_token) == (5, 16, 151669)
    assert shape.windows == (None,) * 5
    assert shape.is_causal == (False,) * 5
    assert shape.rope_theta == 1e6


def test_newer_configs_say_the_same_in_other_places() -> None:
    newer = {
        **PUBLISHED,
        "block_size": None,
        "rope_theta": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000},
        "dflash_config": {**PUBLISHED["dflash_config"], "block_size": 16},
    }
    assert read_shape(Path("folder"), newer) == read_shape(Path("folder"), PUBLISHED)


def test_layers_that_are_not_named_are_spread_over_the_target() -> None:
    unnamed = {**PUBLISHED, "dflash_config": {"mask_token_id": 5}}
    assert read_shape(Path("folder"), unnamed).target_layers == (1, 9, 17, 25, 33)
    alone = {**unnamed, "num_hidden_layers": 1, "layer_types": ["full_attention"]}
    assert read_shape(Path("folder"), alone).target_layers == (18,)


def test_sliding_layers_are_causal_unless_told_otherwise() -> None:
    kinds = ["sliding_attention"] * 4 + ["full_attention"]
    sliding = {**PUBLISHED, "layer_types": kinds, "sliding_window": 2048}
    shape = read_shape(Path("folder"), sliding)
    assert shape.windows == (2048,) * 4 + (None,)
    assert shape.is_causal == (True,) * 4 + (False,)
    assert not any(read_shape(Path("folder"), {**sliding, "is_causal": False}).is_causal)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"architectures": ["Qwen3ForCausalLM"]}, "Qwen3ForCausalLM"),
        ({"architectures": ["DFlash2DraftModel"]}, "DFlash2DraftModel"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope type yarn"),
        ({"dflash_config": {**PUBLISHED["dflash_config"], "selector_rank": 8}}, "selector_rank"),
        ({"dflash_config": {**PUBLISHED["dflash_config"], "target_layer_ids": [36]}}, "target_layer_ids"),
        ({"attention_bias": True}, "attention_bias"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"block_size": None}, "block_size"),
        ({"rope_theta": "much"}, "rope_theta"),
    ],
)
def test_what_would_change_the_network_is_refused_by_name(changed: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckpointError, match=named):
        read_shape(Path("folder"), {**PUBLISHED, **changed})


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    shape = tiny_shape(windows=(4, None), is_causal=(True, False), target_sha256="ab")
    network = BlockNetwork(shape)
    write_network(network, tmp_path, vocab_size=100)
    again = read_network(tmp_path, dtype=torch.float32, device=CPU)
    assert again.shape == shape
    for name, tensor in network.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor.bfloat16().float())


def test_a_tensor_that_is_missing_or_of_another_size_is_named(tmp_path: Path) -> None:
    write_network(BlockNetwork(tiny_shape()), tmp_path, vocab_size=100)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    save_file({name: tensor for name, tensor in tensors.items() if name != "fc.weight"}, file)
    with pytest.raises(CheckpointError, match=r"fc\.weight: missing"):
        read_network(tmp_path, dtype=torch.float32, device=CPU)
    save_file(tensors, file)
    wider = as_config(tiny_shape(intermediate=32), vocab_size=100)
    (tmp_path / "config.json").write_text(json.dumps(wider))
    with pytest.raises(CheckpointError, match=r"layers\.0\.mlp\.down_proj\.weight"):
        read_network(tmp_path, dtype=torch.float32, device=CPU)
