"""Latent attention fused: every way to rotate, to scale and to project queries, in both precisions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hetero_runtime.hf.reference import load_reference
from hetero_runtime.hf.sequences import StaticSequences
from tests.architectures import build_checkpoint, prompt_ids, reference_model
from tests.deepseek_vl2_checkpoints import build_deepseek_vl2
from tests.runtime.hf.plain import greedy_logits, tokens_of

pytest.importorskip("triton")
from hetero_runtime.hf.fused_attention import fuse_attention

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "mscale": 1.0,
    "mscale_all_dim": 0.8,
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "V2 without low rank": ("DeepseekV2", {"q_lora_rank": None}),
    "V2 yarn": ("DeepseekV2", {"rope_parameters": YARN}),
    "V2 biases": ("DeepseekV2", {"attention_bias": True}),
    "V3 halves": ("DeepseekV3", {"rope_interleave": False}),
    "V3 yarn": ("DeepseekV3", {"rope_parameters": YARN}),
    "V3 biases": ("DeepseekV3", {"attention_bias": True}),
    "Moonlight halves": ("Moonlight", {"rope_interleave": False}),
    "Moonlight biases": ("Moonlight", {"attention_bias": True}),
    "Moonlight, other sizes": (
        "Moonlight",
        {"num_attention_heads": 3, "num_key_value_heads": 3, "qk_nope_head_dim": 12, "kv_lora_rank": 20}
        | {"qk_rope_head_dim": 6, "v_head_dim": 10},
    ),
}


def assert_rows_say_the_same(model: Any) -> None:
    """Row 1 of two, fused, says what transformers says."""
    prompt = prompt_ids(11)[0]
    expected = greedy_logits(model, prompt, num_steps=8)
    sequences = StaticSequences(model, rows=2, max_length=32)
    fused = fuse_attention(model)
    assert fused.num_layers == 3, fused
    logits = [sequences.prefill(1, prompt)]
    for _ in range(8):
        logits.append(sequences.decode(torch.stack([torch.tensor(0), logits[-1].argmax()]))[1])
    assert tokens_of(logits) == tokens_of(expected)
    torch.testing.assert_close(torch.stack(logits), torch.stack(expected), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_say_the_same_fused(name: str, tmp_path: Path) -> None:
    architecture, changes = VARIANTS[name]
    assert_rows_say_the_same(reference_model(build_checkpoint(architecture, tmp_path, **changes)))


@pytest.mark.parametrize("variant", ["small", "large"])
def test_language_part_of_a_model_with_images(variant: str, tmp_path: Path) -> None:
    folder = build_deepseek_vl2(variant, tmp_path)
    model: Any = load_reference(folder, dtype="float32", device=torch.device("cpu"))
    assert_rows_say_the_same(model)


@pytest.mark.parametrize("name", ["DeepseekV2", "DeepseekV3", "Moonlight"])
def test_first_layer_in_half_precision(name: str, tmp_path: Path) -> None:
    """Behind it, experts of nearly the same score may be chosen otherwise."""
    model: Any = reference_model(build_checkpoint(name, tmp_path), dtype=torch.bfloat16)
    sequences = StaticSequences(model, rows=3, max_length=32)
    for row, length in enumerate((3, 9, 1)):
        sequences.prefill(row, prompt_ids(length, seed=row)[0])
    outputs: list[torch.Tensor] = []
    model.model.layers[0].self_attn.register_forward_hook(lambda *said: outputs.append(said[-1][0]))
    tokens = prompt_ids(3, seed=7)[0]
    for step in range(2):
        if step:
            assert fuse_attention(model).num_layers == 3
        sequences.decode(tokens)
        sequences.lengths -= 1  # again at the same places
    stock, fused = outputs
    error = (fused.float() - stock.float()).abs().amax(-1) / stock.float().abs().amax(-1)
    assert error.max() <= 2**-6, error


def test_weights_are_kept_once(tmp_path: Path) -> None:
    model: Any = reference_model(build_checkpoint("Moonlight", tmp_path, attention_bias=True))
    StaticSequences(model, rows=1, max_length=8)
    attention = model.model.layers[0].self_attn
    names = ("q_proj.weight", "kv_a_proj_with_mqa.weight", "kv_a_proj_with_mqa.bias", "kv_b_proj.weight")
    before = {name: attention.get_parameter(name).clone() for name in names}
    expansion = attention.kv_b_proj.weight.data_ptr()
    fuse_attention(model)
    after = {name: attention.get_parameter(name) for name in names}
    assert all(torch.equal(after[name], before[name]) for name in names)
    query, latent = (after[name].untyped_storage().data_ptr() for name in names[:2])
    assert query == latent and after["kv_b_proj.weight"].data_ptr() == expansion


@pytest.mark.parametrize("change", ["norm", "expansion bias", "query"])
def test_another_layer_is_left(change: str, tmp_path: Path) -> None:
    model: Any = reference_model(build_checkpoint("Moonlight", tmp_path))
    for layer in model.model.layers:
        attention = layer.self_attn
        if change == "norm":
            attention.kv_a_layernorm = torch.nn.LayerNorm(16)
        elif change == "expansion bias":
            attention.kv_b_proj.bias = torch.nn.Parameter(torch.ones(attention.kv_b_proj.out_features))
        else:
            attention.q_proj = torch.nn.Sequential(attention.q_proj, torch.nn.Tanh())
    StaticSequences(model, rows=1, max_length=8)
    fused = fuse_attention(model)
    assert fused.num_layers == 0 and len(fused.left) == 3
