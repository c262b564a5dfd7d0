"""Cache-Prior: resident experts gain a bonus (Skliar et al., "Mixture of Cache-Conditional Experts", 2025;
PSR Eq. 1 and §6.1)."""

from __future__ import annotations

from dataclasses import dataclass

from hetero_scheduler.routing.base import (
    Priority,
    RangeOf,
    RoutingPolicy,
    Rules,
    check_bonus,
    check_priority,
)


@dataclass(frozen=True)
class CachePrior(RoutingPolicy):
    """`bonus` (lambda) for what the cache holds, and for the router's best `protected` (J), wherever they
    are. As published: LRU, J of 1 or 2, the running range."""

    name = "cache_prior"
    bonus: float = 0.2
    protected: int = 0
    range: RangeOf = "fixed"
    priority: Priority = "lru"

    def __post_init__(self) -> None:
        check_bonus(self.bonus)
        check_priority(self.priority)
        if self.protected < 0:
            raise ValueError(f"protected is {self.protected}; give 0 or more")
        if self.range not in ("fixed", "running"):
            raise ValueError(f"unknown range {self.range!r}; known: fixed, running")

    @property
    def rules(self) -> Rules:
        return Rules(
            bonus=self.bonus,
            protected=self.protected,
            is_running=self.range == "running",
            is_lru=self.priority == "lru",
        )
