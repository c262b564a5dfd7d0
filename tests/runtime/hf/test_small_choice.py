"""Routers that are told what to choose in a few launches: the model says what it says with transformers'."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.architectures import build_checkpoint, prompt_ids, reference_model

pytest.importorskip("triton")
from hetero_runtime.hf.router_choice import RouterScores, SteerableRouter, StockRouter, let_choose
from hetero_runtime.hf.small_choice import SmallChooser, small_choosers

SOFTMAX_ROUTERS = ("Olmoe", "Qwen3Moe", "Mixtral")


def _heard(
    model: Any, routers: list[SteerableRouter] | None
) -> tuple[torch.Tensor, list[tuple[RouterScores, torch.Tensor | None]]]:
    """Logits of a text, every other expert chosen by somebody else; and what that one heard."""
    heard = []

    def choose(_layer: int, said: RouterScores, guess: torch.Tensor | None) -> torch.Tensor:
        heard.append((said, guess))
        worst = said.scores.argsort(dim=-1, stable=True)[:, : said.own.shape[1]]
        is_even = torch.arange(said.own.shape[1]) % 2 == 0
        return torch.where(is_even, said.own, worst)

    let_choose(model, choose, looks_ahead=True, routers=routers)
    with torch.inference_mode():
        return model(input_ids=prompt_ids(3)).logits, heard


@pytest.mark.parametrize("name", SOFTMAX_ROUTERS)
def test_the_model_says_the_same(name: str, tmp_path: Path) -> None:
    model = reference_model(build_checkpoint(name, tmp_path))
    routers = small_choosers(model)
    assert all(isinstance(router, SmallChooser) for router in routers)
    expected, theirs = _heard(model, None)
    logits, ours = _heard(model, routers)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    assert len(ours) == len(theirs) == len(routers)
    for (said, guess), (stock, stock_guess) in zip(ours, theirs, strict=True):
        assert torch.equal(said.own, stock.own)
        torch.testing.assert_close(said.scores, stock.scores, rtol=1e-4, atol=1e-5)
        assert (guess is None) == (stock_guess is None)
        if guess is not None:
            torch.testing.assert_close(guess, stock_guess, rtol=1e-4, atol=1e-5)


def test_another_kind_of_router_stays_as_it_is(tmp_path: Path) -> None:
    model = reference_model(build_checkpoint("DeepseekV3", tmp_path))
    assert all(isinstance(router, StockRouter) for router in small_choosers(model))
