"""Made-up router scores, policies and calibrations for the tests beside this file."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hetero_scheduler.routing import (
    Calibration,
    LogicalCache,
    RoutingPolicy,
    Shape,
    TokenPrior,
    make_routing_policy,
)
from hetero_scheduler.routing.reference import LayerReference

NUM_TOKENS_KNOWN = 5


class Text(NamedTuple):
    """Scores `z` and guesses `g` `[T, L, E]`, the router's `own` choice `[T, L, K]`, `tokens` `[T]`."""

    z: npt.NDArray[np.float32]
    g: npt.NDArray[np.float32]
    own: npt.NDArray[np.int64]
    tokens: npt.NDArray[np.int64]


def make_text(shape: Shape, *, num_tokens: int, seed: int, num_values: int = 0, num_groups: int = 1) -> Text:
    """Scores of a random walk, as neighbouring tokens are alike. `num_values`: so few different scores, for
    ties. `num_groups`: half of them excluded, each token anew, and for a guess now and then others."""
    rng = np.random.default_rng(seed)
    size = (num_tokens, shape.num_layers, shape.num_experts)
    z = 0.6 * np.cumsum(rng.standard_normal(size), axis=0) + rng.standard_normal(size)
    g = z + 0.7 * rng.standard_normal(size)
    if num_values:
        z, g = (np.round(np.tanh(each) * num_values / 2) for each in (z, g))
    if num_groups > 1:
        order = rng.permuted(np.tile(np.arange(num_groups), (*size[:2], 1)), axis=-1)
        excluded = np.repeat(order >= (num_groups + 1) // 2, shape.num_experts // num_groups, axis=-1)
        z = np.where(excluded, -np.inf, z)
        g = np.where(np.where(rng.random(size[:2])[..., None] < 0.7, excluded, ~excluded), -np.inf, g)
    z, g = z.astype(np.float32), g.astype(np.float32)
    shuffled = rng.permutation(shape.num_experts)  # among equals a router takes anyone
    best = np.argsort(-z[..., shuffled], axis=-1, kind="stable")[..., : shape.top_k]
    own = np.ascontiguousarray(shuffled[best], np.int64)
    return Text(z, g, own, rng.integers(0, NUM_TOKENS_KNOWN + 3, num_tokens))


def make_calibration(shape: Shape, *, seed: int) -> Calibration:
    """Random, with a token prior for some tokens."""
    rng = np.random.default_rng(seed)
    share = rng.integers(0, 256, (NUM_TOKENS_KNOWN + 1, *shape[:2])).astype(np.uint8)
    share[-1] = 0
    return Calibration(
        rng.uniform(1, 4, shape.num_layers),
        rng.integers(0, 5, shape[:2]).astype(np.float64),
        TokenPrior(np.sort(rng.permutation(NUM_TOKENS_KNOWN + 2)[:NUM_TOKENS_KNOWN]), share),
    )


def make_cache(policy: RoutingPolicy, shape: Shape, *, capacity: int, seed: int = 0) -> LogicalCache:
    return LogicalCache(policy, shape, capacity=capacity, calibration=make_calibration(shape, seed=seed))


def in_one_scan(cache: LogicalCache, text: Text) -> npt.NDArray[np.int64]:
    """Executed experts `[T, L, K]`, all tokens and layers at once."""
    return cache.select(text.z, text.own, text.tokens, first_layer=0, guesses=text.g).experts


def in_plain_python(
    policy: RoutingPolicy, shape: Shape, text: Text, *, capacity: int, seed: int = 0
) -> tuple[npt.NDArray[np.int64], list[LayerReference]]:
    """The same by the reference, each token's experts ascending; and the layers as they are at the end."""
    calibration = make_calibration(shape, seed=seed)
    layers = [
        LayerReference(policy, shape, layer, capacity=capacity, calibration=calibration)
        for layer in range(shape.num_layers)
    ]
    executed = [
        [
            reference.step(
                text.z[t, layer],
                text.own[t, layer].tolist(),
                text.g[t, layer] if layer and policy.looks_ahead else None,
                int(text.tokens[t]),
            )
            for layer, reference in enumerate(layers)
        ]
        for t in range(len(text.tokens))
    ]
    return np.array(executed), layers


POLICIES = [
    make_routing_policy("exact"),
    make_routing_policy("exact", priority="a"),
    make_routing_policy("cache_prior", bonus=0.3),
    make_routing_policy("cache_prior", bonus=0.2, protected=2, range="running", priority="a"),
    make_routing_policy("psr", bonus=0.2, insertions=1, window=4),
    make_routing_policy("psr", bonus=0.3, insertions=2, window=8, priority="lru"),
    make_routing_policy("psr", bonus=0.0, insertions=8, window=8),
    make_routing_policy("speculative_experts", insertions=1, window=4),
    make_routing_policy("speculative_experts", insertions=0, window=1, priority="lru"),
]
