"""Decode with forecasts runs whole at toy size: routers say what the trace says, shares are of full load."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from bench import predicted_decode
from bench.harness import ResultFile
from bench.models.random_geometry import RandomGeometry
from bench.traces.compact import compress
from bench.traces.routers import replay_routers
from hetero_runtime.prediction import RouterFingerprint, write_predictor
from hetero_scheduler.predict.mamba2_block import Mamba2Sizes
from hetero_scheduler.predict.mamba2_model import GroupModel, GroupShape
from hetero_scheduler.trace import Trace
from tests.bench.traces.test_compact import INFO

LAYERS, TOKENS = 4, 90


@pytest.fixture
def trace(geometry: RandomGeometry) -> Trace:
    """Of twice as many layers as the model has."""
    draw = np.random.default_rng(0)
    logits = draw.permuted(np.linspace(-4, 4, geometry.experts) * np.ones((TOKENS, LAYERS, 1)), axis=-1)
    topk = np.argsort(-logits, axis=-1)[..., : geometry.top_k].astype(np.int16)
    return Trace(
        logits.astype(np.float16), topk, np.arange(TOKENS, dtype=np.int32), np.array([0, 50, TOKENS])
    )


@pytest.fixture
def files(trace: Trace, geometry: RandomGeometry, tmp_path: Path) -> list[str]:
    kept, predictor = tmp_path / "kept.trace.xz", tmp_path / "taught.safetensors"
    kept.write_bytes(compress(trace, INFO))
    sizes = Mamba2Sizes(d_model=32, state_size=8, head_dim=8)
    groups = [GroupModel(GroupShape(2, geometry.experts, geometry.top_k, sizes=sizes)) for _ in range(2)]
    write_predictor(predictor, groups, fingerprint=RouterFingerprint.of_trace(trace, INFO), notes={})
    return [str(kept), str(predictor)]


def test_routers_say_what_was_recorded(trace: Trace, geometry: RandomGeometry) -> None:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=2,
        num_experts=geometry.experts,
        num_experts_per_tok=geometry.top_k,
        moe_intermediate_size=16,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        norm_topk_prob=True,
    )
    model = Qwen3MoeForCausalLM(config).eval()
    replay_routers(model, trace)
    with torch.no_grad():
        said = [
            model(torch.zeros(1, count, dtype=torch.long), output_router_logits=True).router_logits
            for count in (3, 2)
        ]
    for layer in range(2):
        heard = torch.cat([each[layer].reshape(-1, geometry.experts) for each in said])
        expected = torch.from_numpy(trace.logits[:5, layer]).float()
        assert torch.equal(heard, expected) or torch.allclose(heard, expected.softmax(-1))


def test_bench(
    files: list[str], checkpoint: Path, geometry: RandomGeometry, geometry_words: list[str], tmp_path: Path
) -> None:
    words = [*files, "--checkpoint", str(checkpoint), "--device", "cpu", "--results", str(tmp_path)]
    words += ["--experts-format", "checkpoint", "--residencies", "0.5", "--tokens", "4", "--runs", "1"]
    words += ["--link", "50"]
    assert predicted_decode.main([*words, *geometry_words]) == 0
    rows = {row.id: row for row in ResultFile.read(tmp_path / "predicted_decode_checkpoint.json").rows}
    assert set(rows) == {"predict.bound_share_50_checkpoint", "predict.full_load_share_50_checkpoint"}
    assert rows["predict.full_load_share_50_checkpoint"].value > 0
    assert "LRU" in str(rows["predict.full_load_share_50_checkpoint"].reference)
    assert 0 < rows["predict.bound_share_50_checkpoint"].value <= 1


def test_a_model_that_ends_inside_a_group(files: list[str], geometry: RandomGeometry, tmp_path: Path) -> None:
    model = RouterFingerprint(3, geometry.experts, geometry.top_k, "")
    with pytest.raises(ValueError, match=r"3 layers; the predictor's groups end with \[2, 4\]"):
        predicted_decode.fitted(Path(files[1]), model, tmp_path)
