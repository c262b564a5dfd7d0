"""What the routers of a model say, listened to through transformers.

Blocks call their router as a module, with the hidden states first, and the first thing that it returns are
its logits before any normalisation (read in every covered architecture, transformers 5.17 and 5.24).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

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


Hear = Callable[[int, torch.Tensor, torch.Tensor], None]
"""Told of a router that has decided: its MoE layer, its logits `[tokens, num_experts]` before any
normalisation, and what it was asked, `[tokens, hidden_size]`. On the model's device."""


def listen_to_routers(model: Any, hear: Hear) -> list[RemovableHandle]:
    """From now on every router of `model` that runs is heard before its layer's experts run, until the
    handles are removed. A captured graph calls no module and is not heard.

    Raises what `routed_layers` raises.
    """
    return [
        layer.router.register_forward_hook(_telling(hear, index, layer))
        for index, layer in enumerate(routed_layers(model))
    ]


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


def _telling(hear: Hear, index: int, layer: RoutedLayer) -> Callable[..., None]:
    num_experts = layer.num_experts

    def tell(_module: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
        hidden = arguments[0]
        hear(index, _logits_of(output, num_experts, layer.name), hidden.reshape(-1, hidden.shape[-1]))

    return tell


def _logits_of(output: Any, num_experts: int, name: str) -> torch.Tensor:
    """The logits `[tokens, num_experts]` in what a router returned. CheckpointError when there are none."""
    first = output[0] if isinstance(output, tuple) else output
    if not isinstance(first, torch.Tensor) or first.shape[-1] != num_experts:
        found = list(first.shape) if isinstance(first, torch.Tensor) else type(first).__name__
        raise CheckpointError(
            f"{name}: its router gives no logits for {num_experts} experts but {found}; "
            "this version of transformers is not covered, use one from the tested range"
        )
    return first.reshape(-1, num_experts)
