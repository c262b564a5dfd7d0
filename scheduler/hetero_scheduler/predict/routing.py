"""A model's routing: its sizes, its groups of layers, and what a router says of one token, as arrays."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt


class RouterShape(NamedTuple):
    """Sizes of a model's routing: MoE layers, experts a layer, experts that each token activates."""

    num_layers: int
    num_experts: int
    top_k: int


def layer_groups(num_layers: int, num_groups: int = 2) -> tuple[range, ...]:
    """The model's layers in `num_groups` runs; each run is predicted once its last layer has routed.

    Two, the default, are triggered after L/2 and L layers (SeqMoE §9.1). Raises ValueError when there are
    more groups than layers.
    """
    if not 1 <= num_groups <= num_layers:
        raise ValueError(f"{num_layers} layers do not divide into {num_groups} groups")
    ends = [round(num_layers * group / num_groups) for group in range(num_groups + 1)]
    return tuple(range(first, last) for first, last in pairwise(ends))


def chosen_experts(router_logits: npt.NDArray[np.floating], top_k: int) -> npt.NDArray[np.intp]:
    """The `top_k` experts of greatest logit, greatest first, ties to the lowest.

    `[..., E]` → `[..., top_k]`
    """
    return np.argsort(-router_logits, axis=-1, kind="stable")[..., :top_k]


def shares(
    router_logits: npt.NDArray[np.floating], chosen: npt.NDArray[np.integer]
) -> npt.NDArray[np.float32]:
    """Activation-masked softmax: the chosen experts share 1, all others get 0 (SeqMoE §5.2).

    `router_logits` `[..., E]`, `chosen` `[..., K]`; returns `[..., E]`.
    """
    logits = np.take_along_axis(router_logits.astype(np.float32), chosen.astype(np.intp), axis=-1)
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    result = np.zeros(router_logits.shape, dtype=np.float32)
    np.put_along_axis(result, chosen.astype(np.intp), weights, axis=-1)
    return result
