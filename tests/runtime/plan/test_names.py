"""Tensor names of the checkpoints that exist, and where each belongs."""

from __future__ import annotations

import pytest

from hetero_runtime.plan.names import parse_expert, region_of


@pytest.mark.parametrize(
    ("name", "layer", "expert", "field"),
    [
        ("model.layers.3.mlp.experts.17.gate_proj.weight", 3, 17, "gate_up_proj.weight"),
        ("model.layers.3.mlp.experts.17.up_proj.weight_scale_inv", 3, 17, "gate_up_proj.weight_scale_inv"),
        ("model.layers.0.block_sparse_moe.experts.7.w2.weight", 0, 7, "down_proj.weight"),
        ("layers.5.ffn.experts.1.w3.scale", 5, 1, "gate_up_proj.scale"),
        ("model.layers.2.mlp.experts.gate_up_proj", 2, None, "gate_up_proj"),
        ("model.layers.2.mlp.experts.gate_up_proj_blocks", 2, None, "gate_up_proj_blocks"),
        ("model.layers.2.mlp.experts.down_proj_bias", 2, None, "down_proj_bias"),
        ("language.model.layers.9.mlp.experts.71.up_proj.weight", 9, 71, "gate_up_proj.weight"),
        ("model.language_model.layers.9.mlp.experts.down_proj", 9, None, "down_proj"),
    ],
)
def test_routed_experts(name: str, layer: int, expert: int | None, field: str) -> None:
    assert parse_expert(name) == (layer, expert, field)


@pytest.mark.parametrize(
    ("name", "region"),
    [
        ("model.embed_tokens.weight", "backbone"),
        ("model.layers.3.mlp.gate.weight", "backbone"),
        ("model.layers.3.mlp.gate.e_score_correction_bias", "backbone"),
        ("model.layers.3.mlp.experts.e_score_correction_bias", "backbone"),
        ("model.layers.0.mlp.gate_proj.weight", "backbone"),
        ("model.layers.3.mlp.shared_experts.up_proj.weight", "shared"),
        ("model.layers.3.mlp.shared_expert_gate.weight", "shared"),
        ("model.visual.blocks.3.mlp.linear_fc1.weight", "vision"),
        ("vision_tower.encoder.layers.60.mlp.fc1.weight", "vision"),
        ("vision.blocks.26.attn.qkv.weight", "vision"),
        ("projector.layers.2.weight", "vision"),
        ("image_newline", "backbone"),
        ("language.model.layers.3.mlp.shared_experts.up_proj.weight", "shared"),
        ("model.layers.4.eh_proj.weight", "mtp"),
        ("mtp.layers.0.mlp.gate.weight", "mtp"),
    ],
)
def test_all_else(name: str, region: str) -> None:
    assert parse_expert(name) is None
    assert region_of(name, num_layers=4) == region
