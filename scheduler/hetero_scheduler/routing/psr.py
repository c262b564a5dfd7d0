"""Prefetch-steered routing (PSR §4, Algorithm 1)."""

from __future__ import annotations

from dataclasses import dataclass

from hetero_scheduler.routing.base import (
    Priority,
    RoutingPolicy,
    Rules,
    check_bonus,
    check_priority,
    check_steering,
)


@dataclass(frozen=True)
class Psr(RoutingPolicy):
    """Cache-Prior's bonus on a cache into which the next layer's router, asked one layer early, inserts.

    `insertions` (n): new experts a layer and token; `window`: of the pre-gate's best so many. `bonus` 0 is
    exact routing with logical prefetching.
    """

    name = "psr"
    bonus: float = 0.2
    insertions: int = 1
    window: int = 2
    priority: Priority = "a"

    def __post_init__(self) -> None:
        check_bonus(self.bonus)
        check_steering(self.insertions, self.window)
        check_priority(self.priority)

    @property
    def rules(self) -> Rules:
        return Rules(
            bonus=self.bonus,
            insertions=self.insertions,
            window=self.window,
            is_lru=self.priority == "lru",
        )
