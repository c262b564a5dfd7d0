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


def test_module_that_computes_something_else_is_left(tmp_path: Path) -> None:
    model: Any = reference_model(build_checkpoint("Olmoe", tmp_path))
    norm = model.model.norm
    stock = type(norm).forward
    norm.forward = lambda hidden: stock(norm, hidden) * 1.01
    ops = install_small_ops(model, routers=False)
    assert ops.left == ("model.norm",) and ops.num_routers == 0
