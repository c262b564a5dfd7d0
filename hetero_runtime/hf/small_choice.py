"""Routers that let somebody else choose, in a few launches instead of transformers' twenty.

    stock   product ─ scores ─ groups ─ top-k ─ masks, casts ─ [choose] ─ gather ─ sum, quotient, cast
    small   product, scores, top-k ─ [choose] ─ weights of what was chosen
            └ with those of the next layer's router, one layer early

A captured step pays for every launch, and it asks two routers a layer. A router is one of these only where
`small_routers` found that its kernel says what transformers' module says; the others stay as they are.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from hetero_gpu.router import Router
from hetero_gpu.score_router import ScoreRouter
from hetero_runtime.hf.router_choice import Choose, RouterScores, SteerableRouter, StockRouter
from hetero_runtime.hf.router_hooks import routed_layers
from hetero_runtime.hf.small_routers import is_top_k_router, small_router


class SmallChooser(SteerableRouter, Protocol):
    """A router of few launches, which can also be told its logits."""

    def heard(self, logits: torch.Tensor) -> RouterScores:
        """What it would let choose from, had it said `logits` `[T, E]`, of whatever type."""

    def weigh(self, logits: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """Weights `[T, top_k]` of `experts`, int64 of that shape, chosen by whomever."""


class SoftmaxChooser:
    """A softmax router: what it says is what it compares."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self.weigh = router.weigh

    def run(self, hidden: torch.Tensor, choose: Choose, *, following: SteerableRouter | None) -> Any:
        """As for SteerableRouter, `following` of any kind."""
        hidden, guess = _flat(hidden), None
        if isinstance(following, SoftmaxChooser):
            logits, _, own, guess = self._router.with_next(hidden, following._router)
        else:
            guess = None if following is None else following.scores(hidden)
            logits, _, own = self._router(hidden)
        experts = choose(RouterScores(logits, own), guess)
        return logits, self.weigh(logits, experts), experts

    def scores(self, hidden: torch.Tensor) -> torch.Tensor:
        """As for SteerableRouter."""
        return self._router.logits(_flat(hidden))

    def heard(self, logits: torch.Tensor) -> RouterScores:
        """As for SmallChooser."""
        return RouterScores(logits, self._router.choose(logits)[1])


class ScoreChooser:
    """A router of sigmoid scores with a correction, or of groups of experts."""

    def __init__(self, router: ScoreRouter) -> None:
        self._router = router
        self.weigh = router.weigh

    def run(self, hidden: torch.Tensor, choose: Choose, *, following: SteerableRouter | None) -> Any:
        """As for SteerableRouter, `following` of any kind."""
        hidden, guess = _flat(hidden), None
        if isinstance(following, ScoreChooser):
            scored, ahead = self._router.with_next(hidden, following._router)
            guess = ahead.scores
        else:
            guess = None if following is None else following.scores(hidden)
            scored = self._router(hidden)
        experts = choose(RouterScores(scored.scores, scored.experts), guess)
        return scored.logits, self.weigh(scored.logits, experts), experts

    def scores(self, hidden: torch.Tensor) -> torch.Tensor:
        """As for SteerableRouter."""
        return self._router(_flat(hidden)).scores

    def heard(self, logits: torch.Tensor) -> RouterScores:
        """As for SmallChooser."""
        scored = self._router.choose(logits)
        return RouterScores(scored.scores, scored.experts)


@torch.inference_mode()
def small_choosers(model: Any) -> list[SmallChooser | StockRouter]:
    """Who stands in for the routers of `model`, one a MoE layer. Raises what `routed_layers` raises."""
    choosers: list[SmallChooser | StockRouter] = []
    for layer in routed_layers(model):
        block = model.get_submodule(layer.name)
        router = small_router(block, layer.router, model.dtype) if is_top_k_router(layer.router) else None
        if router is None:
            choosers.append(StockRouter(model, layer))
        else:
            choosers.append(SoftmaxChooser(router) if isinstance(router, Router) else ScoreChooser(router))
    return choosers


def _flat(hidden: torch.Tensor) -> torch.Tensor:
    return hidden.reshape(-1, hidden.shape[-1])
