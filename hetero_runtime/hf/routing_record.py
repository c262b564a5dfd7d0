"""The routing of whatever a model is run on, kept.

    hidden ─► router ── (logits, weights, choice) ─► block ── (hidden, choice, weights) ─► Experts
                 └─ logits are kept here                            └─ the choice is kept here

The choice is kept where the Experts module receives it: with expert groups or correction biases it is not the
top-k of the logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch

from hetero_runtime.errors import CheckpointError
from hetero_runtime.hf.early_routers import EarlyRouters
from hetero_runtime.hf.router_hooks import RoutedLayer, listen_to_routers, routed_layers

_HALF = torch.finfo(torch.float16)


class Routing(NamedTuple):
    """Of all MoE layers, in order: `logits` float16 `[T, L, E]`, `top_k` int64 `[T, L, K]`, on the host.

    `early`: as in a trace; None unless it was asked for. Where float16 does not reach, it holds its ends.
    """

    logits: torch.Tensor
    top_k: torch.Tensor
    early: torch.Tensor | None


class RoutingRecord:
    """Grows with every pass of the model that it listens to."""

    def __init__(self, layers: list[RoutedLayer], early_routers: EarlyRouters | None) -> None:
        self._names = [layer.name for layer in layers]
        self._early_routers = early_routers
        self._logits: list[list[torch.Tensor]] = [[] for _ in layers]
        self._top_k: list[list[torch.Tensor]] = [[] for _ in layers]
        self._early: list[list[torch.Tensor]] = [[] for _ in layers]

    def take(self) -> Routing:
        """All tokens since the last call, in the order in which they passed; then forgets them.

        Raises CheckpointError, naming the layer, where float16 cannot hold the logits.
        """
        logits, top_k, early = _together(self._logits), _together(self._top_k), None
        if self._early_routers is not None:
            self._early[0] = [torch.zeros_like(logits[:, 0])]
            early = _together(self._early).clamp(_HALF.min, _HALF.max).to(torch.float16)
        self.clear()
        half = logits.to(torch.float16)
        if not torch.isfinite(half).all():
            layer = int((~torch.isfinite(half)).any(dim=-1).any(dim=0).int().argmax())
            raise CheckpointError(
                f"{self._names[layer]}: router logits reach {float(logits[:, layer].abs().max()):.3g}, and a "
                f"trace keeps float16 (up to {_HALF.max:,.0f}); check the model with `hetero-runtime verify`"
            )
        return Routing(half, top_k, early)

    def clear(self) -> None:
        """Forget a pass that was given up in its middle."""
        for parts in (*self._logits, *self._top_k, *self._early):
            parts.clear()

    def hear(self, layer: int, logits: torch.Tensor, hidden: torch.Tensor) -> None:
        """As in `listen_to_routers`."""
        self._logits[layer].append(logits.detach().float().cpu())
        if self._early_routers is not None:
            early = self._early_routers(layer, hidden)
            if early is not None:
                self._early[layer + 1].append(early.detach().float().cpu())

    def keep_choice(self, layer: int, arguments: tuple[Any, ...]) -> None:
        """`arguments`: what the Experts module of `layer` was called with: hidden, choice, weights."""
        self._top_k[layer].append(arguments[1].detach().long().cpu())


@contextmanager
def record_routing(model: Any, *, asks_early: bool = False) -> Iterator[RoutingRecord]:
    """Inside, every eager pass of `model` is recorded; a captured graph calls no module and is not.

    `asks_early`: also ask each router with the input of the layer before. Raises what `routed_layers` raises.
    """
    layers = routed_layers(model)
    record = RoutingRecord(layers, EarlyRouters(model) if asks_early else None)
    with ExitStack() as stack:
        for handle in listen_to_routers(model, record.hear):
            stack.callback(handle.remove)
        for index, layer in enumerate(layers):
            stack.callback(layer.experts.register_forward_pre_hook(_before(record, index)).remove)
        yield record


def _before(record: RoutingRecord, layer: int) -> Callable[..., None]:
    return lambda _module, arguments: record.keep_choice(layer, arguments)


def _together(by_layer: list[list[torch.Tensor]]) -> torch.Tensor:
    """`[tokens, layers, …]`"""
    return torch.stack([torch.cat(parts) for parts in by_layer], dim=1)
