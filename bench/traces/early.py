"""Every router asked one layer before its time, while a narrow model runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import Qwen3MoeForCausalLM

from hetero_runtime.hf.early_routers import EarlyRouters
from hetero_runtime.hf.router_hooks import listen_to_routers


class EarlyTap:
    """What routers say to the input of the layer before; nothing is copied to the host."""

    def __init__(self, routers: EarlyRouters, num_layers: int) -> None:
        self._routers = routers
        self._heard: list[Tensor | None] = [None] * num_layers

    def take(self, batch: int) -> Tensor:
        """What the last forward, of `batch` rows, said; forgets it. There must have been one.

        Returns `[layers, batch, steps, experts]`, zeros for layer 0, which has no layer before it.
        """
        heard = [said for said in self._heard[1:] if said is not None]
        assert len(heard) == len(self._heard) - 1, "no forward since the last take"
        self._heard = [None] * len(self._heard)
        return torch.stack([torch.zeros_like(heard[0]), *heard]).unflatten(1, (batch, -1))

    def hear(self, layer: int, logits: Tensor, hidden: Tensor) -> None:
        """As in `listen_to_routers`."""
        said = self._routers(layer, hidden)
        if said is not None:
            self._heard[layer + 1] = said


@contextmanager
def asked_early(model: Qwen3MoeForCausalLM) -> Iterator[EarlyTap]:
    """Inside, every forward of `model` asks its routers early."""
    tap = EarlyTap(EarlyRouters(model), model.config.num_hidden_layers)
    handles = listen_to_routers(model, tap.hear)
    try:
        yield tap
    finally:
        for handle in handles:
            handle.remove()
