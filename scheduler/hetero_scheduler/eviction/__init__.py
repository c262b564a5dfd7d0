"""Eviction policies: each one keeps a score, and the slot machine evicts the least."""

from __future__ import annotations

from hetero_scheduler.eviction.base import EvictionPolicy, keeping

EVICTION_POLICIES = ("lru", "lfu", "lfru")
"""Policies of history alone. The device tables know them by their place in this order."""
FORECAST_POLICIES = ("belady", "lookahead")
"""Policies that are also told what a predictor forecasts."""
FOLLOWING_POLICIES = ("logical",)
"""Policies whose scores a routing policy keeps: a use changes none."""

__all__ = ["EVICTION_POLICIES", "FORECAST_POLICIES", "EvictionPolicy", "keeping", "make_eviction"]


def make_eviction(name: str, *, num_layers: int, num_experts: int) -> EvictionPolicy:
    """The policy called `name`, with no history yet. Raises ValueError for a name that is none."""
    if name == "lru":
        from hetero_scheduler.eviction.lru import Lru

        return Lru(num_layers, num_experts)
    if name == "lfu":
        from hetero_scheduler.eviction.lfu import Lfu

        return Lfu(num_layers, num_experts)
    if name == "lfru":
        from hetero_scheduler.eviction.lfru import Lfru

        return Lfru(num_layers, num_experts)
    if name == "belady":
        from hetero_scheduler.eviction.belady_forecast import BeladyForecast

        return BeladyForecast(num_layers, num_experts)
    if name == "lookahead":
        from hetero_scheduler.eviction.lookahead import Lookahead

        return Lookahead(num_layers, num_experts)
    known = ", ".join(EVICTION_POLICIES + FORECAST_POLICIES)
    raise ValueError(f"unknown eviction policy {name!r}; known: {known}")
