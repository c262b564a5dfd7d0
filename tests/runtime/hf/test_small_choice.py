"""Routers that are told what to choose in a few launches: the model says what it says with transformers'."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.architectures import build_checkpoint, prompt_ids, reference_model

pytest.importorskip("triton")
from hetero_runtime.hf.router_choice import RouterScores, SteerableRouter, StockRouter, let_choose
from hetero_runtime.hf.router_hooks import routed_layers
from hetero_runtime.hf.small_choice import ScoreChooser, SoftmaxChooser, small_choosers

CHOOSERS = {
    "Olmoe": SoftmaxChooser,
    "Qwen3Moe": SoftmaxChooser,
    "Mixtral": SoftmaxChooser,
    "DeepseekV2": ScoreChooser,
    "DeepseekV3": ScoreChooser,
    "Moonlight": ScoreChooser,
    "Glm4Moe": ScoreChooser,
    "MiniMaxM2": ScoreChooser,
}


def _heard(
    model: Any, routers: list[SteerableRouter] | None
) -> tuple[torch.Tensor, list[tuple[RouterScores, torch.Tensor | None]]]:
    """Logits of a text, the best, third best and so on chosen by somebody else; and what that one heard."""
    heard = []

    def choose(_layer: int, said: RouterScores, guess: torch.Tensor | None) -> torch.Tensor:
        heard.append((said, guess))
        ranked = said.scores.argsort(dim=-1, descending=True, stable=True)
        return ranked[:, : 2 * said.own.shape[1] : 2]

    let_choose(model, choose, looks_ahead=True, routers=routers)
    with torch.inference_mode():
        return model(input_ids=prompt_ids(3)).logits, heard


@pytest.mark.parametrize("name", CHOOSERS)
def test_the_model_says_the_same(name: str, tmp_path: Path) -> None:
    model = reference_model(build_checkpoint(name, tmp_path))
    routers = small_choosers(model)
    assert all(isinstance(router, CHOOSERS[name]) for router in routers)
    expected, theirs = _heard(model, None)
    logits, ours = _heard(model, routers)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    assert len(ours) == len(theirs) == len(routers)
    for (said, guess), (stock, stock_guess) in zip(ours, theirs, strict=True):
        assert torch.equal(said.own.sort().values, stock.own.sort().values)
        assert torch.equal(said.scores.isinf(), stock.scores.isinf()), "the same groups are left out"
        torch.testing.assert_close(said.scores, stock.scores, rtol=1e-4, atol=1e-5)
        assert (guess is None) == (stock_guess is None)
        if guess is not None:
            torch.testing.assert_close(guess, stock_guess, rtol=1e-4, atol=1e-5)


def test_another_kind_of_router_stays_as_it_is(tmp_path: Path) -> None:
    model = reference_model(build_checkpoint("DeepseekV3", tmp_path))
    odd, *others = (layer.router for layer in routed_layers(model))
    stock = odd.forward

    def thrice(hidden: torch.Tensor) -> Any:
        logits, weights, experts = stock(hidden)
        return logits, 3 * weights, experts

    odd.forward = thrice
    first, *rest = small_choosers(model)
    assert isinstance(first, StockRouter)
    assert len(rest) == len(others) > 0
    assert all(isinstance(router, ScoreChooser) for router in rest)
