"""Which attention layers run fused, and that rows say the same with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hetero_runtime.hf.sequences import StaticSequences
from tests.architectures import build_checkpoint, prompt_ids, reference_model
from tests.runtime.hf.plain import greedy_logits, tokens_of

pytest.importorskip("triton")
from hetero_runtime.hf.fused_attention import fuse_attention

FUSED = {
    "Olmoe": 3,
    "Qwen2Moe": 3,
    "Qwen3Moe": 3,
    "Mixtral": 3,
    "Glm4Moe": 3,
    "MiniMaxM2": 3,
    "GptOss": 3,
    "Qwen3VLMoe": 3,
    "DeepseekV2": 3,
    "DeepseekV3": 3,
    "Moonlight": 3,
    "Qwen3Next": 0,
}
"""Layers that run fused: gated attention keeps its own forward."""


@pytest.mark.parametrize("name", FUSED)
def test_rows_say_the_same_fused(name: str, tmp_path: Path) -> None:
    model: Any = reference_model(build_checkpoint(name, tmp_path))
    prompt = prompt_ids(11)[0]
    expected = greedy_logits(model, prompt, num_steps=16)
    sequences = StaticSequences(model, rows=2, max_length=32)
    fused = fuse_attention(model)
    assert fused.num_layers == FUSED[name], fused
    logits = [sequences.prefill(1, prompt)]
    for _ in range(16):
        tokens = torch.stack([torch.tensor(0), logits[-1].argmax()])
        logits.append(sequences.decode(tokens)[1])
    assert tokens_of(logits) == tokens_of(expected)
    torch.testing.assert_close(torch.stack(logits), torch.stack(expected), rtol=1e-3, atol=1e-3)


def test_projections_share_their_memory_afterwards(tmp_path: Path) -> None:
    model: Any = reference_model(build_checkpoint("Qwen3Moe", tmp_path))
    StaticSequences(model, rows=1, max_length=8)
    before = model.model.layers[0].self_attn.k_proj.weight.clone()
    fuse_attention(model)
    attention = model.model.layers[0].self_attn
    assert torch.equal(attention.k_proj.weight, before)
    assert attention.k_proj.weight.untyped_storage().data_ptr() == attention.q_proj.weight.data_ptr()


def test_clipping_layer_is_left(tmp_path: Path) -> None:
    model: Any = reference_model(build_checkpoint("Olmoe", tmp_path))
    model.config.clip_qkv = 3.0
    StaticSequences(model, rows=1, max_length=8)
    fused = fuse_attention(model)
    assert fused.num_layers == 0 and len(fused.left) == 3
