"""A routing, from a resolved configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from hetero_runtime.calibration import read_calibration
from hetero_runtime.config import ResolvedConfig
from hetero_runtime.config.routing import READS
from hetero_runtime.errors import ConfigError
from hetero_runtime.hf.architectures import Architecture
from hetero_runtime.hf.router_hooks import routed_layers, router_top_k
from hetero_runtime.routing.routing import Routing
from hetero_scheduler.routing import Shape, make_routing_policy

_OF_THE_CACHE = ("capacity", "calibration")


def make_routing(config: ResolvedConfig, model: Any, architecture: Architecture) -> Routing | None:
    """The routing of `config` on logical caches; None for exact routing, which needs nothing, and for that of
    drafts, which has pools.

    `model`: it may still be without weights. Raises ConfigError for a model whose routers cannot be told what
    to choose.
    """
    routing = config.routing
    if routing.policy in ("exact", "block_selection"):
        return None
    shape = steerable_shape(config, model, architecture)
    names = [name for name in READS[routing.policy] if name not in _OF_THE_CACHE]
    policy = make_routing_policy(routing.policy, **{name: getattr(routing, name) for name in names})
    calibration = read_calibration(Path(routing.calibration)).calibration
    assert routing.capacity != "auto", "the capacity is decided when a configuration is resolved"
    made = Routing(policy, shape, capacity=routing.capacity, calibration=calibration)
    _compile(made)
    return made


def steerable_shape(config: ResolvedConfig, model: Any, architecture: Architecture) -> Shape:
    """Sizes of the model's routing. Raises ConfigError where its routers cannot be told what to choose."""
    if not architecture.is_steerable:
        raise ConfigError(
            f"routing.policy: {config.routing.policy} does not cover {architecture.model_class}, some of "
            "whose routers choose by other means than their scores; write routing.policy: exact"
        )
    layers = routed_layers(model)
    return Shape(len(layers), layers[0].num_experts, router_top_k(model))


def _compile(routing: Routing) -> None:
    """Now, not while somebody waits for a token."""
    cache, (num_layers, num_experts, top_k) = routing.new_cache(), routing.shape
    scores, own = np.zeros((1, 1, num_experts), np.float32), np.arange(top_k).reshape(1, 1, top_k)
    if num_layers > 1:
        cache.steer(1, scores[0, 0], 0)
    cache.select(scores, own, np.zeros(1, np.int64), first_layer=0)
