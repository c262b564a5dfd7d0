"""Execute what the layer before predicted (Madan et al., 2026, in the variant of PSR §4.2)."""

from __future__ import annotations

from dataclasses import dataclass

from hetero_scheduler.routing.base import Priority, RoutingPolicy, Rules, check_priority, check_steering


@dataclass(frozen=True)
class SpeculativeExperts(RoutingPolicy):
    """The pre-gate's best top_k are executed, with the weights that the router gives them; the first layer,
    which nothing foresees, follows its router. Insertions as for PSR: they move copies, not choices."""

    name = "speculative_experts"
    insertions: int = 1
    window: int = 2
    priority: Priority = "a"

    def __post_init__(self) -> None:
        check_steering(self.insertions, self.window)
        check_priority(self.priority)

    @property
    def rules(self) -> Rules:
        return Rules(
            insertions=self.insertions,
            window=self.window,
            is_lru=self.priority == "lru",
            executes_guess=True,
        )
