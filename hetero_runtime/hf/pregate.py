"""The experts that the next layer's router would choose now, for a captured step."""

from __future__ import annotations

from typing import Any

import torch

from hetero_gpu.router import route
from hetero_runtime.hf.early_routers import EarlyRouters


class PreGate:
    """Guesses the experts of the next MoE layer, `num_guesses` for each row.

    `active`: bool `[rows]` on the device; of rows that are not, nothing is guessed. Raises what
    `routed_layers` raises for a model whose layers have no learned router.
    """

    def __init__(self, model: Any, *, num_guesses: int, active: torch.Tensor) -> None:
        self._early = EarlyRouters(model)
        self._num_guesses = min(num_guesses, self._early.num_experts)
        self._active = active

    def __call__(self, layer: int, hidden: torch.Tensor) -> torch.Tensor | None:
        """Keys int32 `[rows * num_guesses]`: the best of all rows, then the second of all rows, and so on."""
        logits = self._early(layer, hidden)
        if logits is None:
            return None
        _, experts = route(logits, top_k=self._num_guesses, is_renormalised=False, dtype=logits.dtype)
        keys = experts + (layer + 1) * self._early.num_experts
        if len(hidden) > 1:  # a single row is always active in its own step
            keys = torch.where(self._active[: len(hidden), None], keys, -1).t()
        return keys.flatten().int().contiguous()
