"""The shape of a model is read from headers; a folder that is not whole is refused with numbers."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from hetero_runtime.errors import CheckpointError
from hetero_runtime.plan import read_geometry
from tests.sparse_checkpoint import QWEN3_30B, SMALL, Tensors, qwen3_tensors, write_checkpoint, write_qwen3


def _message(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        read_geometry(folder)
    return str(caught.value)


def test_qwen3_30b_in_16_shards(tmp_path: Path) -> None:
    write_qwen3(tmp_path, QWEN3_30B, shards=16)
    begin = time.perf_counter()
    geometry = read_geometry(tmp_path)
    assert time.perf_counter() - begin < 5
    assert (geometry.num_moe_layers, geometry.num_experts, geometry.top_k) == (48, 128, 8)
    assert geometry.record_bytes == 3 * 2048 * 768 * 2
    assert geometry.num_routed_experts * geometry.record_bytes == 57_982_058_496
    assert geometry.dtype == "bfloat16"
    assert geometry.kv.bytes_per_token(2) == 48 * 2 * 4 * 128 * 2
    assert (geometry.vocab_size, geometry.max_context) == (151936, 40960)
    assert geometry.backbone.num_bytes(2) == pytest.approx(3.1e9, rel=0.05)


def test_scales_biases_and_padding_are_in_the_record(tmp_path: Path) -> None:
    tensors: Tensors = {"model.embed_tokens.weight": ("BF16", (1000, 256))}
    for layer in range(4):
        prefix = f"model.layers.{layer}.mlp.experts"
        tensors[f"{prefix}.gate_up_proj_blocks"] = ("U8", (8, 256, 8, 16))
        tensors[f"{prefix}.gate_up_proj_scales"] = ("U8", (8, 256, 8))
        tensors[f"{prefix}.gate_up_proj_bias"] = ("BF16", (8, 256))
        tensors[f"{prefix}.down_proj_blocks"] = ("U8", (8, 256, 4, 16))
        tensors[f"{prefix}.down_proj_scales"] = ("U8", (8, 256, 4))
        tensors[f"{prefix}.down_proj_bias"] = ("BF16", (8, 256))
    geometry = read_geometry(write_checkpoint(tmp_path, SMALL, tensors))
    fields = 256 * 8 * 16 + 256 * 8 + 512 + 256 * 4 * 16 + 256 * 4 + 512
    assert geometry.record_bytes == -(-fields // 4096) * 4096
    assert geometry.expert_dtype == "U8"


def test_regions_ties_and_layers_that_nobody_loads(tmp_path: Path) -> None:
    extra: Tensors = {
        "model.layers.1.mlp.shared_expert.up_proj.weight": ("BF16", (10, 256)),
        "model.visual.patch_embed.weight": ("BF16", (20, 256)),
        "model.layers.4.mlp.experts.0.up_proj.weight": ("BF16", (30, 256)),
        "model.layers.4.eh_proj.weight": ("BF16", (40, 256)),
    }
    whole = read_geometry(write_checkpoint(tmp_path / "a", SMALL, {**qwen3_tensors(SMALL), **extra}))
    tied = {**SMALL, "tie_word_embeddings": True}
    without = read_geometry(write_checkpoint(tmp_path / "b", tied, qwen3_tensors(SMALL)))
    assert whole.shared.num_bytes(4) == 10 * 256 * 4
    assert whole.vision.num_bytes(2) == 20 * 256 * 2
    assert whole.moe_layers == (0, 1, 2, 3)
    assert whole.notes == (f"multi-token-prediction layers are not loaded ({70 * 256 * 2} bytes)",)
    assert whole.backbone.float_elements - without.backbone.float_elements == 1000 * 256


def test_fp8_backbone_is_counted_dequantised(tmp_path: Path) -> None:
    tensors = qwen3_tensors(SMALL)
    name = "model.layers.0.self_attn.q_proj.weight"
    plain = read_geometry(write_checkpoint(tmp_path / "a", SMALL, tensors))
    tensors[name] = ("F8_E4M3", tensors[name][1])
    tensors[f"{name}_scale_inv"] = ("F32", (2, 2))
    fp8 = read_geometry(write_checkpoint(tmp_path / "b", SMALL, tensors))
    assert fp8.backbone.num_bytes(2) == plain.backbone.num_bytes(2)


def test_a_vision_language_config_is_read_from_its_text_part(tmp_path: Path) -> None:
    text = {**SMALL, "model_type": "qwen3_vl_moe_text"}
    config = {"model_type": "qwen3_vl_moe", "text_config": text, "vision_config": {"hidden_size": 9}}
    tensors = {
        name.replace("model.layers", "model.language_model.layers"): value
        for name, value in qwen3_tensors(SMALL).items()
    }
    geometry = read_geometry(write_checkpoint(tmp_path, config, tensors))
    assert (geometry.model_type, geometry.hidden_size) == ("qwen3_vl_moe", 256)
    assert geometry.num_moe_layers == 4


def test_no_config(tmp_path: Path) -> None:
    write_qwen3(tmp_path)
    (tmp_path / "config.json").unlink()
    assert "config.json: cannot be read" in _message(tmp_path)


def test_a_dense_model(tmp_path: Path) -> None:
    dense = {key: value for key, value in SMALL.items() if key != "num_experts"}
    message = _message(write_checkpoint(tmp_path, dense, qwen3_tensors(SMALL)))
    assert "describes a model without routed experts" in message
    assert "num_local_experts" in message


def test_a_config_of_experts_over_weights_of_none(tmp_path: Path) -> None:
    message = _message(write_checkpoint(tmp_path, SMALL, {"model.norm.weight": ("BF16", (256,))}))
    assert "speaks of 8 experts, but no tensor is named like one" in message


def test_a_missing_shard(tmp_path: Path) -> None:
    write_qwen3(tmp_path, shards=3)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    message = _message(tmp_path)
    assert "1 of 3 shards" in message
    assert "model-00002-of-00003.safetensors" in message


def test_a_truncated_shard(tmp_path: Path) -> None:
    write_qwen3(tmp_path, shards=3)
    shard = tmp_path / "model-00002-of-00003.safetensors"
    size = shard.stat().st_size
    with shard.open("r+b") as file:
        file.truncate(size - 100)
    message = _message(tmp_path)
    assert f"of a file of {size - 100} bytes" in message
    assert f"ends at byte {size}" in message


def test_a_missing_expert(tmp_path: Path) -> None:
    tensors = qwen3_tensors(SMALL)
    kept = {name: value for name, value in tensors.items() if ".2.mlp.experts.5." not in name}
    assert "layer 2 has 7 of the 8 experts" in _message(write_checkpoint(tmp_path, SMALL, kept))


def test_experts_that_are_not_alike(tmp_path: Path) -> None:
    tensors = qwen3_tensors(SMALL)
    tensors["model.layers.2.mlp.experts.5.up_proj.weight"] = ("BF16", (1280, 256))
    message = _message(write_checkpoint(tmp_path, SMALL, tensors))
    assert "expert 5 of layer 2 takes" in message
    assert "must all be alike" in message


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"num_experts_per_tok": 9}, "routes a token to 9 of 8 experts"),
        ({"hidden_size": "wide"}, "hidden_size is 'wide'"),
        ({"vocab_size": None}, "has none of vocab_size"),
        ({"num_experts": 0}, "without routed experts"),
    ],
    ids=str,
)
def test_a_config_with_a_wrong_number(tmp_path: Path, change: dict[str, object], part: str) -> None:
    write_qwen3(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**SMALL, **change}))
    assert part in _message(tmp_path)


def test_the_whole_models_dtype_comes_before_its_language_parts(tmp_path: Path) -> None:
    write_qwen3(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    nested = {"dtype": "bfloat16", "model_type": "x", "text_config": {**config, "dtype": "float32"}}
    (tmp_path / "config.json").write_text(json.dumps(nested))
    assert read_geometry(tmp_path).dtype == "bfloat16"
