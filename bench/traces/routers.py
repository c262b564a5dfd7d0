"""Routers that say what a trace recorded, so that whoever listens to them hears a trained model.

`bench.routing_replay` puts recorded experts behind routers of random weights; a predictor would still hear
those. Here the logits themselves are replayed, and the routers go on from there as they always do.
"""

from __future__ import annotations

from typing import Any

import torch

from bench.routing_replay import RecordedChoice
from hetero_gpu.router import route
from hetero_runtime.hf.router_hooks import routed_layers
from hetero_scheduler.trace import Trace


def replay_routers(model: Any, trace: Trace) -> None:
    """From now on the routers of `model`, a Qwen3-MoE, say one token of `trace` after another; its first
    layers, where the model has fewer. A step that was captured before must be captured again."""
    layers = routed_layers(model)
    device = next(model.parameters()).device
    logits = RecordedChoice(trace.logits[:, : len(layers)], device=device, dtype=torch.float16)
    for number, layer in enumerate(layers):
        layer.router.forward = _Replayed(layer.router, logits, number)


class _Replayed:
    """The forward of one router."""

    def __init__(self, router: Any, logits: RecordedChoice, layer: int) -> None:
        self._router, self._logits, self._layer = router, logits, layer

    def __call__(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        router, dtype = self._router, hidden.dtype
        said = self._logits.take(self._layer, hidden.shape[:-1].numel()).float()
        if said.is_cuda:
            chosen = route(said, top_k=router.top_k, is_renormalised=router.norm_topk_prob, dtype=dtype)
            return said, *chosen
        weights, experts = said.softmax(-1).topk(router.top_k, dim=-1)
        if router.norm_topk_prob:
            weights = weights / weights.sum(-1, keepdim=True)
        return said, weights.to(dtype), experts
