"""What the routers of a model say, listened to through transformers.

    hidden ─► router ── (logits, weights, choice) ─► block ── (hidden, choice, weights) ─► Experts
                 └─ logits are kept here                            └─ the choice is kept here

Blocks call their router as a module, and the first thing that it returns are its logits before any
normalisation (read in every covered architecture, transformers 5.17 and 5.24). The choice is kept where the
Experts module receives it: with expert groups or correction biases it is not the top-k of the logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from hetero_runtime.checkpoint import Checkpoint
from hetero_runtime.errors import CheckpointError
from hetero_runtime.hf.conversion import expert_modules
from hetero_runtime.hf.loading import build_skeleton

_ROUTER_NAMES = ("gate", "router")
_HASH_TABLE = "tid2eid"
"""What transformers' hash routers look experts up in, by token id."""


class RoutedLayer(NamedTuple):
    """One MoE layer: the name of its block, and the two modules that are listened to."""

    name: str
    router: nn.Module
    experts: nn.Module

    @property
    def num_experts(self) -> int:
        """Experts of the layer."""
        return int(next(self.experts.parameters()).shape[0])


class Routing(NamedTuple):
    """Of all MoE layers, in order: `logits` float16 `[T, L, E]`, `top_k` int64 `[T, L, K]`, on the host."""

    logits: torch.Tensor
    top_k: torch.Tensor


class RoutingRecord:
    """Grows with every pass of the model that it listens to."""

    def __init__(self, layers: list[RoutedLayer]) -> None:
        self._names = [layer.name for layer in layers]
        self._num_experts = [layer.num_experts for layer in layers]
        self._logits: list[list[torch.Tensor]] = [[] for _ in layers]
        self._top_k: list[list[torch.Tensor]] = [[] for _ in layers]

    def take(self) -> Routing:
        """All tokens since the last call, in the order in which they passed; then forgets them.

        Raises CheckpointError, naming the layer, where float16 cannot hold the logits.
        """
        logits = torch.stack([torch.cat(parts) for parts in self._logits], dim=1)
        top_k = torch.stack([torch.cat(parts) for parts in self._top_k], dim=1)
        self.clear()
        half = logits.to(torch.float16)
        if not torch.isfinite(half).all():
            layer = int((~torch.isfinite(half)).any(dim=-1).any(dim=0).int().argmax())
            raise CheckpointError(
                f"{self._names[layer]}: router logits reach {float(logits[:, layer].abs().max()):.3g}, and a "
                f"trace keeps float16 (up to {torch.finfo(torch.float16).max:,.0f}); check the model with "
                "`hetero-runtime verify`"
            )
        return Routing(half, top_k)

    def clear(self) -> None:
        """Forget a pass that was given up in its middle."""
        for parts in (*self._logits, *self._top_k):
            parts.clear()

    def keep_logits(self, layer: int, output: Any) -> None:
        """`output`: what the router of `layer` returned. CheckpointError when it begins with no logits."""
        logits = _logits_of(output, num_experts=self._num_experts[layer], name=self._names[layer])
        self._logits[layer].append(logits.detach().float().cpu())

    def keep_choice(self, layer: int, arguments: tuple[Any, ...]) -> None:
        """`arguments`: what the Experts module of `layer` was called with: hidden, choice, weights."""
        self._top_k[layer].append(arguments[1].detach().long().cpu())


@contextmanager
def record_routing(model: Any) -> Iterator[RoutingRecord]:
    """Inside, every eager pass of `model` is recorded; a captured graph calls no module and is not.

    Raises what `routed_layers` raises.
    """
    layers = routed_layers(model)
    record = RoutingRecord(layers)
    with ExitStack() as stack:
        for index, layer in enumerate(layers):
            stack.callback(layer.router.register_forward_hook(_after(record, index)).remove)
            stack.callback(layer.experts.register_forward_pre_hook(_before(record, index)).remove)
        yield record


def listen_to_routers(model: Any, hear: Callable[[int, torch.Tensor], None]) -> None:
    """From now on every router of `model` that runs is heard before its layer's experts run.

    `hear(layer, logits)`: logits `[tokens, num_experts]` of a MoE layer, before any normalisation, on the
    model's device. Raises what `routed_layers` raises.
    """
    for index, layer in enumerate(routed_layers(model)):
        layer.router.register_forward_hook(_telling(hear, index, layer))


def router_top_k(model: Any) -> int:
    """Experts that the routers of `model` choose for a token."""
    text = model.config.get_text_config(decoder=True)
    return int(getattr(text, "num_experts_per_tok", 0) or text.top_k)


def routed_layers(model: Any) -> list[RoutedLayer]:
    """The MoE layers of `model`, in order.

    Raises CheckpointError, naming the layer, when one has no router that decides by its logits.
    """
    modules = dict(model.named_modules())
    layers = []
    for name, experts in expert_modules(model).items():
        block = name.rpartition(".")[0]
        routers = [getattr(modules[block], each) for each in _ROUTER_NAMES if hasattr(modules[block], each)]
        if not routers:
            raise CheckpointError(f"{block}: has no router named {' or '.join(_ROUTER_NAMES)}; not covered")
        if hasattr(routers[0], _HASH_TABLE):
            raise CheckpointError(
                f"{block}: chooses experts by token id ({type(routers[0]).__name__}), so there are no router "
                "logits to hear; traces and forecasts need a learned router in every MoE layer"
            )
        layers.append(RoutedLayer(block, routers[0], experts))
    return layers


def check_recordable(path: Path, *, dtype: str) -> None:
    """Raise what `record_routing` would raise for the checkpoint at `path`, before any weight is read."""
    skeleton = build_skeleton(Checkpoint.open(path), dtype=dtype, device=torch.device("cpu"))
    routed_layers(skeleton.model)


def _after(record: RoutingRecord, layer: int) -> Callable[..., None]:
    return lambda _module, _arguments, output: record.keep_logits(layer, output)


def _before(record: RoutingRecord, layer: int) -> Callable[..., None]:
    return lambda _module, arguments: record.keep_choice(layer, arguments)


def _telling(
    hear: Callable[[int, torch.Tensor], None], index: int, layer: RoutedLayer
) -> Callable[..., None]:
    num_experts = layer.num_experts
    return lambda _module, _arguments, output: hear(
        index, _logits_of(output, num_experts=num_experts, name=layer.name)
    )


def _logits_of(output: Any, *, num_experts: int, name: str) -> torch.Tensor:
    """The logits `[tokens, num_experts]` in what a router returned. CheckpointError when there are none."""
    first = output[0] if isinstance(output, tuple) else output
    if not isinstance(first, torch.Tensor) or first.shape[-1] != num_experts:
        found = list(first.shape) if isinstance(first, torch.Tensor) else type(first).__name__
        raise CheckpointError(
            f"{name}: its router gives no logits for {num_experts} experts but {found}; "
            "this version of transformers is not covered, use one from the tested range"
        )
    return first.reshape(-1, num_experts)
