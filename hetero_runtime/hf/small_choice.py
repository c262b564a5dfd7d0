"""Routers that let somebody else choose, in a few launches instead of transformers' twenty.

    stock   product ─ softmax ─ top-k ─ masks, casts ─ [choose] ─ gather ─ sum, quotient, cast
    small   product, softmax, top-k ─ [choose] ─ weights of what was chosen
            and the next layer's router, one layer early: a product

A captured step pays for every launch, and it asks two routers a layer. A router is one of these only where
`small_ops` found that its kernel says what transformers' module says; the others stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hetero_gpu.router import Router
from hetero_runtime.hf.router_choice import RouterScores, SteerableRouter, StockRouter
from hetero_runtime.hf.router_hooks import routed_layers
from hetero_runtime.hf.small_ops import is_top_k_router, small_router


class SmallChooser:
    """A softmax router."""

    def __init__(self, router: Router) -> None:
        self.router = router

    def run(self, hidden: torch.Tensor, choose: Callable[[RouterScores], torch.Tensor]) -> Any:
        """As for SteerableRouter."""
        logits, _, own = self.router(_flat(hidden))
        experts = choose(RouterScores(logits, own))
        return logits, self.router.weigh(logits, experts), experts

    def scores(self, hidden: torch.Tensor) -> torch.Tensor:
        """As for SteerableRouter."""
        return self.router.logits(_flat(hidden))


@torch.inference_mode()
def small_choosers(model: Any) -> list[SteerableRouter]:
    """Who stands in for the routers of `model`, one a MoE layer. Raises what `routed_layers` raises."""
    choosers: list[SteerableRouter] = []
    for layer in routed_layers(model):
        router = small_router(layer.router, model.dtype) if is_top_k_router(layer.router) else None
        choosers.append(StockRouter(model, layer) if router is None else SmallChooser(router))
    return choosers


def _flat(hidden: torch.Tensor) -> torch.Tensor:
    return hidden.reshape(-1, hidden.shape[-1])
