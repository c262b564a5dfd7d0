"""Splitting a checkpoint by transformers' tables, and what is said of one that cannot be split."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import transformers

from hetero_runtime.checkpoint import Checkpoint
from hetero_runtime.errors import CheckpointError
from hetero_runtime.experts.formats import WeightForm
from hetero_runtime.experts.sources import plan_experts
from hetero_runtime.hf.conversion import split_checkpoint
from tests.architectures import ARCHITECTURES, build_checkpoint
from tests.runtime.experts.loading import Tensors, load, rewrite, split


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_tensor_is_on_one_side(name: str, tmp_path: Path) -> None:
    folder = build_checkpoint(name, tmp_path)
    experts, backbone = split(folder)
    sources = [s for m in experts for p in m.parameters for s in (*p.weights.values(), *p.scales.values())]
    keys = {entry.key for source in sources for entry in source.entries}
    assert keys.isdisjoint(backbone)
    assert keys | set(backbone) == set(Checkpoint.open(folder).entries)
    assert not [key for key in backbone if re.search(r"\.experts\.", key)]


def test_unknown_experts_stay_on_the_other_side(tmp_path: Path) -> None:
    """A multi-token-prediction head has experts too, which the model does not have."""
    folder = build_checkpoint("Qwen3Next", tmp_path)
    rewrite(folder, lambda t: t | {"mtp.layers.0.mlp.experts.0.down_proj.weight": torch.zeros(64, 32)})
    assert "mtp.layers.0.mlp.experts.0.down_proj.weight" in split(folder).backbone


def drop(*keys: str) -> object:
    return lambda tensors: {key: t for key, t in tensors.items() if not key.endswith(keys)}


def put(key: str, tensor: torch.Tensor) -> object:
    return lambda tensors: tensors | {key: tensor}


LAYER = "model.layers.1.mlp.experts"


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (
            "Olmoe",
            drop("1.mlp.experts.3.up_proj.weight"),
            r"gate_up_proj: .* 16 experts, .* experts \[3\] are missing",
        ),
        ("Olmoe", drop("down_proj.weight"), "experts.down_proj: the checkpoint has no tensor for it"),
        ("Olmoe", drop("up_proj.weight"), r"has .*gate_proj.weight, but no .*up_proj.weight; download"),
        ("Olmoe", put(f"{LAYER}.16.down_proj.weight", torch.zeros(64, 32)), "there are more than that"),
        (
            "Olmoe",
            put(f"{LAYER}.2.down_proj.weight", torch.zeros(64, 16)),
            r"F32\[64, 32\] but .*F32\[64, 16\]",
        ),
        (
            "Olmoe",
            put(f"{LAYER}.2.down_proj.weight", torch.zeros(64, 32).half()),
            r"is F16\[64, 32\]; all experts",
        ),
        ("Qwen3VLMoe", drop("0.mlp.experts.gate_up_proj"), "gate_up_proj: the checkpoint has no tensor"),
        (
            "Qwen3VLMoe",
            put("model.language_model.layers.0.mlp.experts.down_proj", torch.zeros(8, 64, 32)),
            r"expected one tensor with 16 experts as its first axis, found .* \[8, 64, 32\]",
        ),
        ("Qwen3MoeFp8", drop("1.mlp.experts.3.up_proj.weight_scale_inv"), r"experts \[3\] are missing"),
        ("Qwen3MoeFp8", drop("up_proj.weight_scale_inv"), "each quantised weight needs its scales"),
        ("Qwen3MoeFp8", drop("weight_scale_inv"), "are F8_E4M3; expected one of F32, F16, BF16"),
        ("GptOssMxfp4", drop("down_proj_scales"), r"has .*down_proj_blocks, but no down_proj_scales"),
    ],
)
def test_what_is_missing_or_odd_is_named(name: str, change: object, message: str, tmp_path: Path) -> None:
    folder = build_checkpoint(name, tmp_path)
    rewrite(folder, change)  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match=message):
        plan_experts(split(folder).experts)


def test_integer_weights_are_refused(tmp_path: Path) -> None:
    def to_int(tensors: Tensors) -> Tensors:
        return {k: t.int() if ".experts." in k else t for k, t in tensors.items()}

    folder = rewrite(build_checkpoint("Olmoe", tmp_path), to_int)
    with pytest.raises(CheckpointError, match="are I32; expected one of F32, F16, BF16"):
        plan_experts(split(folder).experts)


def test_gate_and_up_of_two_dtypes_are_refused(tmp_path: Path) -> None:
    def half_gate(tensors: Tensors) -> Tensors:
        return {k: t.half() if k.endswith("gate_proj.weight") else t for k, t in tensors.items()}

    folder = rewrite(build_checkpoint("Olmoe", tmp_path), half_gate)
    with pytest.raises(CheckpointError, match="are F16 and F32; expected one of"):
        plan_experts(split(folder).experts)


@pytest.mark.parametrize("name", ["Olmoe", "GptOssMxfp4"])
def test_a_config_of_another_size_is_refused(name: str, tmp_path: Path) -> None:
    folder = build_checkpoint(name, tmp_path)
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"intermediate_size": 32', '"intermediate_size": 64'))
    with pytest.raises(
        CheckpointError, match=r"\[128, 64\] there, the checkpoint|expected U8 blocks \[128, 2, 16\]"
    ):
        plan_experts(split(folder).experts)


def test_layers_that_differ_are_both_named(tmp_path: Path) -> None:
    def half_layer(tensors: Tensors) -> Tensors:
        return {k: t.half() if "layers.1.mlp.experts" in k else t for k, t in tensors.items()}

    folder = rewrite(build_checkpoint("Olmoe", tmp_path), half_layer)
    with pytest.raises(
        CheckpointError, match=r"layers.0.mlp.experts and model.layers.1.mlp.experts differ in gate_up"
    ):
        plan_experts(split(folder).experts)


def test_a_scale_grid_that_fits_no_block_is_refused(tmp_path: Path) -> None:
    def cut(tensors: Tensors) -> Tensors:
        return {k: t[:, :3] if ".experts." in k and k.endswith("_inv") else t for k, t in tensors.items()}

    folder = rewrite(build_checkpoint("Qwen3MoeFp8", tmp_path), cut)
    with pytest.raises(
        CheckpointError, match=r"has a scale grid of \[2, 3\], which neither weight_block_size \(16, 16\)"
    ):
        plan_experts(split(folder).experts)


def test_blocks_of_another_size_than_configured(tmp_path: Path) -> None:
    """As transformers does, an even grid speaks for itself."""

    def per_row(tensors: Tensors) -> Tensors:
        return {
            k: t.repeat_interleave(16, 0) if ".experts." in k and k.endswith("_inv") else t
            for k, t in tensors.items()
        }

    store = load(rewrite(build_checkpoint("Qwen3MoeFp8", tmp_path), per_row))
    assert store.forms["gate_up_proj"] == WeightForm("block_scaled", (1, 16))
    store.close()


def test_experts_of_packed_fp4_with_power_of_two_scales(tmp_path: Path) -> None:
    """As DeepSeek V4 publishes them; the check after loading compares with transformers' own operations."""

    def pack(tensors: Tensors) -> Tensors:
        out = dict(tensors)
        for key in [k for k in tensors if ".experts." in k and k.endswith(".weight")]:
            rows, cols = tensors[key].shape
            out[key] = torch.randint(-128, 128, (rows, cols // 2), dtype=torch.int8)
            scales = torch.randint(110, 130, (rows, cols // 32), dtype=torch.uint8)
            out[f"{key}_scale_inv"] = scales.view(torch.float8_e8m0fnu)
        return out

    store = load(rewrite(build_checkpoint("Qwen3MoeFp8", tmp_path), pack))
    assert store.forms["down_proj"] == WeightForm("block_scaled", (1, 32))
    assert [(f.name, f.shape) for f in store.layout.fields][:2] == [
        ("gate_up_proj", (64, 32)), ("gate_up_proj.scale", (2, 32, 2)),
    ]  # fmt: skip
    store.close()


def test_a_model_without_experts_says_so(tmp_path: Path) -> None:
    folder = build_checkpoint("Olmoe", tmp_path)
    with torch.device("meta"):
        dense = transformers.OlmoForCausalLM(
            transformers.OlmoConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=1, vocab_size=8)
        )
    with pytest.raises(CheckpointError, match="OlmoForCausalLM has no routed experts"):
        split_checkpoint(dense, Checkpoint.open(folder), None)
