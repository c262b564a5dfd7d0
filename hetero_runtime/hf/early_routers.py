"""The next layer's router on this layer's input: what residual streams make alike, heard one layer early.

Source: Hwang et al., "Pre-gated MoE", ISCA 2024, without their fine-tuning; SeqMoE §2.2, "similarity-based".
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from hetero_runtime.hf.router_hooks import routed_layers


class EarlyRouters:
    """Asks routers one layer before their time.

    Raises what `routed_layers` raises for a model whose layers have no learned router.
    """

    def __init__(self, model: Any) -> None:
        layers = routed_layers(model)
        self.num_experts = layers[0].num_experts
        self._routers: list[tuple[Any, Any]] = [
            (layer.router.weight, getattr(layer.router, "bias", None)) for layer in layers
        ]

    def __call__(self, layer: int, hidden: torch.Tensor) -> torch.Tensor | None:
        """Logits `[tokens, E]` of the router of `layer` + 1; None after the last layer.

        `hidden`: `[tokens, hidden_size]`, the input of the router of `layer`.
        """
        following = layer + 1
        if following == len(self._routers):
            return None
        weight, bias = self._routers[following]
        return functional.linear(hidden.to(weight.dtype), weight, bias)
