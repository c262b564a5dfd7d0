"""The tiers of one engine, made from its configuration: what holds experts, moves them, and where to."""

from __future__ import annotations

from contextlib import ExitStack
from typing import NamedTuple

import torch

from hetero_gpu import SlabCache, SlabPool
from hetero_runtime.config import ResolvedConfig
from hetero_runtime.experts.base import ExpertStore
from hetero_runtime.foresight.link import Link
from hetero_runtime.tiers.supply import Supply, make_slabs, make_supply
from hetero_scheduler import EvictionPolicy, ExpertKey, SlotMachine


class Tiers(NamedTuple):
    """Where experts live, the slabs that computation reads, and what moves them there.

    `link`: how long that takes; None where nobody asks.
    """

    store: ExpertStore
    slabs: SlabPool
    supply: Supply
    link: Link | None
    cache: SlabCache
    eviction: EvictionPolicy


def make_tiers(
    config: ResolvedConfig,
    store: ExpertStore,
    device: torch.device,
    *,
    eviction: EvictionPolicy,
    is_timed: bool,
    undo: ExitStack,
) -> Tiers:
    """Slabs, what fills them, and the cache, the pinned prefix in it. `is_timed`: somebody asks the link.

    `undo` gets what frees them.
    """
    slabs = make_slabs(config, store, num_slabs=sum(_layer_slots(config, store)), device=device)
    undo.callback(slabs.close)
    supply = make_supply(config, store, slabs, eviction=eviction)
    undo.callback(supply.close)
    link = supply.link() if is_timed else None
    per_layer = _layer_slots(config, store) if config.memory.pool == "per_layer" else None
    num_layers, num_experts = store.num_layers, store.num_experts
    cache = SlabCache(
        slabs=slabs,
        machine=SlotMachine(
            slabs.num_slabs, num_layers=num_layers, num_experts=num_experts, layer_slots=per_layer
        ),
        eviction=eviction,
        copier=supply.copier,
        record=supply.record,
    )
    for layer in range(num_layers if config.slabs_are_bank else config.memory.pinned_prefix):
        for expert in range(num_experts):
            cache.pin(ExpertKey(layer, expert))
    return Tiers(store, slabs, supply, link, cache, eviction)


def _layer_slots(config: ResolvedConfig, store: ExpertStore) -> list[int]:
    """Slots by layer: all experts of the pinned prefix, the slabs spread evenly over the rest."""
    num_pinned = config.memory.pinned_prefix
    num_rest = store.num_layers - num_pinned
    share, extra = divmod(config.memory.slabs, num_rest) if num_rest else (0, 0)
    return [store.num_experts] * num_pinned + [share + (i < extra) for i in range(num_rest)]
