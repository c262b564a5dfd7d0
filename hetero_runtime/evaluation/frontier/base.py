"""What a frontier is made of."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from hetero_runtime.evaluation.divergence import Divergence
from hetero_runtime.evaluation.perplexity import Perplexity
from hetero_scheduler.routing import RoutingPolicy


@dataclass(frozen=True)
class Contender:
    """A policy, and the line that it is a point of."""

    policy: RoutingPolicy
    family: str
    """What a line of the picture is called: a policy with all its parameters but the bonus."""
    bonus: float | None
    """Where on that line it lies (lambda); None where the policy has no bonus."""

    @property
    def name(self) -> str:
        """`psr n=1 w=4, 0.2`"""
        return self.family if self.bonus is None else f"{self.family}, {self.bonus:g}"


@dataclass(frozen=True)
class Point:
    """What one contender does at one residency. Copies are those of an engine that mirrors the logical cache,
    a token and all layers together."""

    contender: Contender
    residency: float
    """Share of all experts that the logical cache holds."""
    capacity: int
    """Experts a layer in it."""
    divergence: Divergence
    """From the exact model, on text that this one wrote."""
    perplexity: Perplexity | None
    """On held-out text; None where there was none."""
    inserted: float
    """Copies issued a layer ahead, for what the pre-gate inserts."""
    demanded: float
    """Copies that a layer waits for from its router on."""
    deviating: float
    """Share of the executed experts that the router would not have chosen."""

    @property
    def copies(self) -> float:
        """All of them."""
        return self.inserted + self.demanded

    def to_json(self) -> dict[str, Any]:
        """One flat row."""
        return {
            "name": self.contender.name,
            "family": self.contender.family,
            "policy": self.contender.policy.name,
            "parameters": asdict(self.contender.policy),  # type: ignore[call-overload]
            "residency": self.residency,
            "capacity": self.capacity,
            "kl": self.divergence.nats,
            "kl_standard_error": self.divergence.standard_error,
            "excess_perplexity": self.divergence.excess_perplexity,
            "perplexity": None if self.perplexity is None else self.perplexity.perplexity,
            "copies": self.copies,
            "demand_copies": self.demanded,
            "prefetch_copies": self.inserted,
            "deviating": self.deviating,
        }
