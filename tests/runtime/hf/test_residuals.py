"""Residual sums with the norms behind them: which layers take them together, and that rows say the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hetero_runtime.hf.sequences import StaticSequences
from tests.architectures import build_checkpoint, prompt_ids, reference_model
from tests.runtime.hf.plain import greedy_logits, tokens_of

pytest.importorskip("triton")
from hetero_gpu.norms import NormForm, rms_norm_reference
from hetero_runtime.hf.residuals import FusedNorm
from hetero_runtime.hf.small_ops import install_small_ops, remove_small_ops

FUSED = {"Qwen3Moe": 3, "GptOss": 3, "DeepseekV3": 3, "Glm4Moe": 3, "Qwen3VLMoe": 3, "Qwen3Next": 1}
"""Layers fused. Those of linear attention keep their own forward."""


@pytest.mark.parametrize("name", FUSED)
def test_steps_say_the_same_fused(name: str, tmp_path: Path) -> None:
    model: Any = reference_model(build_checkpoint(name, tmp_path))
    prompt = prompt_ids(11)[0]
    expected = greedy_logits(model, prompt, num_steps=6)
    sequences = StaticSequences(model, rows=1, max_length=32)
    assert install_small_ops(model, routers=False).num_layers == FUSED[name]
    logits = [sequences.prefill(0, prompt)]
    for _ in range(6):
        logits.append(sequences.decode(logits[-1].argmax()[None])[0])
    assert tokens_of(logits) == tokens_of(expected)
    torch.testing.assert_close(torch.stack(logits), torch.stack(expected), rtol=1e-3, atol=1e-3)


def test_layer_that_scales_its_residual_is_left(tmp_path: Path) -> None:
    model: Any = reference_model(build_checkpoint("Qwen3Moe", tmp_path))
    layer = model.model.layers[1]
    kind = type(layer)

    class Scaling(kind):  # type: ignore[misc, valid-type]
        def forward(self, hidden_states: torch.Tensor, **named: Any) -> torch.Tensor:
            output: torch.Tensor = 0.9 * super().forward(hidden_states, **named)
            return output

    layer.__class__ = Scaling
    assert install_small_ops(model).num_layers == 2
    assert "forward" not in layer.__dict__
    assert "forward" not in layer.self_attn.__dict__ and "forward" not in layer.mlp.__dict__
    remove_small_ops(model)
    assert all("forward" not in module.__dict__ for module in model.modules())


def test_prepared_norm_is_only_for_the_sum_itself() -> None:
    norm = FusedNorm(torch.nn.RMSNorm(16), 1e-6, NormForm())
    hidden, other = torch.randn(2, 1, 16), torch.randn(2, 1, 16)
    total = norm.prepare(hidden, other)
    torch.testing.assert_close(total, hidden + other)
    weight = torch.ones(16)
    expected = rms_norm_reference(total, weight, eps=1e-6, form=NormForm())
    torch.testing.assert_close(norm(total), expected)
    norm.prepare(hidden, other)
    copy = 2 * total
    torch.testing.assert_close(
        norm(copy), rms_norm_reference(copy, weight, eps=1e-6, form=NormForm()), rtol=1e-5, atol=1e-5
    )
    total.zero_()
    assert not norm(total).any(), "what was prepared is taken once"
