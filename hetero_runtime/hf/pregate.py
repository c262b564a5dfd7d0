"""The next layer's router on this layer's input: what residual streams make alike, seen one layer early.

Source: Hwang et al., "Pre-gated MoE", ISCA 2024, without their fine-tuning; SeqMoE §2.2, "similarity-based".
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from hetero_gpu.router import route
from hetero_runtime.hf.router_hooks import routed_layers


class PreGate:
    """Guesses the experts of the next MoE layer, `num_guesses` for each row.

    `active`: bool `[rows]` on the device; of rows that are not, nothing is guessed. Raises what
    `routed_layers` raises for a model whose layers have no learned router.
    """

    def __init__(self, model: Any, *, num_guesses: int, active: torch.Tensor) -> None:
        layers = routed_layers(model)
        self._routers: list[tuple[Any, Any]] = [
            (layer.router.weight, getattr(layer.router, "bias", None)) for layer in layers
        ]
        self._num_experts = layers[0].num_experts
        self._num_guesses = min(num_guesses, self._num_experts)
        self._active = active

    def __call__(self, layer: int, hidden: torch.Tensor) -> torch.Tensor | None:
        """Keys int32 `[rows * num_guesses]`: the best of all rows, then the second of all rows, and so on."""
        following = layer + 1
        if following == len(self._routers):
            return None
        weight, bias = self._routers[following]
        logits = functional.linear(hidden.to(weight.dtype), weight, bias)
        _, experts = route(logits, top_k=self._num_guesses, is_renormalised=False, dtype=logits.dtype)
        keys = experts + following * self._num_experts
        if len(hidden) > 1:  # a single row is always active in its own step
            keys = torch.where(self._active[: len(hidden), None], keys, -1).t()
        return keys.flatten().int().contiguous()
