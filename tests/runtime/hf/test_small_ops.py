"""Which modules are replaced by kernels, and that the model says the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.architectures import build_checkpoint, prompt_ids, reference_model

pytest.importorskip("triton")
from hetero_runtime.hf.router_hooks import routed_layers
from hetero_runtime.hf.small_ops import install_small_ops, remove_small_ops

SOFTMAX_ROUTERS = ("Olmoe", "Qwen2Moe", "Qwen3Moe", "Mixtral", "Qwen3Next", "Qwen3VLMoe", "GptOss")
NUM_MLPS = {"Qwen2Moe": 3, "Qwen3Next": 3, "DeepseekV2": 3, "DeepseekV3": 3, "Moonlight": 3, "Glm4Moe": 3}
"""Dense layers, and experts that all tokens share; the other models have none."""
SCORE_ROUTERS = ("DeepseekV2", "DeepseekV3", "Moonlight", "Glm4Moe", "MiniMaxM2")


@pytest.mark.parametrize("name", [*SOFTMAX_ROUTERS, *SCORE_ROUTERS])
def test_model_says_the_same_with_small_ops(name: str, tmp_path: Path) -> None:
    model: Any = reference_model(build_checkpoint(name, tmp_path))
    ids = prompt_ids(2)
    with torch.inference_mode():
        expected = model(input_ids=ids).logits
        ops = install_small_ops(model)
        logits = model(input_ids=ids).logits
        remove_small_ops(model)
        assert torch.equal(model(input_ids=ids).logits, expected)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    assert ops.num_norms >= 2 * 3 + 1
    assert ops.num_routers == len(routed_layers(model)), ops
    assert ops.num_mlps == NUM_MLPS.get(name, 0), ops


def test_module_that_computes_something_else_is_left(tmp_path: Path) -> None:
    model: Any = reference_model(build_checkpoint("Olmoe", tmp_path))
    norm = model.model.norm
    stock = type(norm).forward
    norm.forward = lambda hidden: stock(norm, hidden) * 1.01
    ops = install_small_ops(model, routers=False)
    assert ops.left == ("model.norm",) and ops.num_routers == 0


@pytest.mark.parametrize("change", ["limit", "gelu", "bias"])
def test_mlp_that_computes_something_else_is_left(change: str, tmp_path: Path) -> None:
    model: Any = reference_model(build_checkpoint("Moonlight", tmp_path))
    mlp = model.model.layers[0].mlp
    if change == "bias":
        mlp.up_proj.bias = torch.nn.Parameter(torch.zeros(mlp.up_proj.out_features))
    else:
        limited = torch.nn.Sequential(torch.nn.Hardtanh(-10.0, 10.0), mlp.act_fn)
        mlp.act_fn = torch.nn.GELU() if change == "gelu" else limited
    ops = install_small_ops(model)
    assert ops.num_mlps == 2 and "forward" not in mlp.__dict__
