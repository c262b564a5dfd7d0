"""One pass of a model, kept: what every router was asked and what it chose.

Layers may see different numbers of tokens, where some are dropped on the way; the last tokens are alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch

from hetero_runtime.hf.router_hooks import listen_to_routers, routed_layers


class HeardPass(NamedTuple):
    """By MoE layer: `hidden` `[tokens, hidden_size]`, `chosen` int64 `[tokens, top_k]`; on the model's
    device."""

    hidden: list[torch.Tensor]
    chosen: list[torch.Tensor]


class PassRecord:
    """Holds the last pass."""

    def __init__(self, num_layers: int) -> None:
        self._num_layers = num_layers
        self._hidden: list[torch.Tensor] = []
        self._chosen: list[torch.Tensor] = []

    def take(self) -> HeardPass:
        """The pass since the last call; asserts that it was a whole one."""
        heard = HeardPass(self._hidden, self._chosen)
        assert len(heard.hidden) == len(heard.chosen) == self._num_layers, (
            f"{len(heard.hidden)} routers and {len(heard.chosen)} choices were heard, of {self._num_layers}"
        )
        self._hidden, self._chosen = [], []
        return heard

    def hear(self, _layer: int, _logits: torch.Tensor, hidden: torch.Tensor) -> None:
        """As in `listen_to_routers`."""
        self._hidden.append(hidden.detach())

    def keep_choice(self, arguments: tuple[Any, ...]) -> None:
        """`arguments`: what an Experts module was called with: hidden, choice, weights."""
        self._chosen.append(arguments[1].detach().long())


@contextmanager
def record_passes(model: Any) -> Iterator[PassRecord]:
    """Inside, every eager pass of `model` is kept until the next. Raises what `routed_layers` raises."""
    layers = routed_layers(model)
    record = PassRecord(len(layers))
    with ExitStack() as stack:
        for handle in listen_to_routers(model, record.hear):
            stack.callback(handle.remove)
        for layer in layers:
            stack.callback(layer.experts.register_forward_pre_hook(_keeping(record)).remove)
        yield record


def _keeping(record: PassRecord) -> Callable[..., None]:
    return lambda _module, arguments: record.keep_choice(arguments)
