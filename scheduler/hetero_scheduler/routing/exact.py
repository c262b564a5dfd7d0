"""The router decides."""

from __future__ import annotations

from dataclasses import dataclass

from hetero_scheduler.routing.base import Priority, RoutingPolicy, Rules, check_priority


@dataclass(frozen=True)
class Exact(RoutingPolicy):
    """Executes the router's own choice; the logical cache beside it counts copies and changes nothing."""

    name = "exact"
    priority: Priority = "lru"

    def __post_init__(self) -> None:
        check_priority(self.priority)

    @property
    def rules(self) -> Rules:
        return Rules(is_lru=self.priority == "lru")
