"""Eviction policies: each one keeps a score, and the slot machine evicts the least."""

from __future__ import annotations

from typing import Literal, get_args

from hetero_scheduler.eviction.base import EvictionPolicy

EvictionName = Literal["lru", "lfu", "lfru"]
EVICTION_POLICIES: tuple[EvictionName, ...] = get_args(EvictionName)

__all__ = ["EVICTION_POLICIES", "EvictionName", "EvictionPolicy", "make_eviction"]


def make_eviction(name: EvictionName, *, num_layers: int, num_experts: int) -> EvictionPolicy:
    """The policy called `name`, with no history yet."""
    if name == "lru":
        from hetero_scheduler.eviction.lru import Lru

        return Lru(num_layers, num_experts)
    if name == "lfu":
        from hetero_scheduler.eviction.lfu import Lfu

        return Lfu(num_layers, num_experts)
    if name == "lfru":
        from hetero_scheduler.eviction.lfru import Lfru

        return Lfru(num_layers, num_experts)
    raise ValueError(f"unknown eviction policy {name!r}; known: {', '.join(EVICTION_POLICIES)}")
