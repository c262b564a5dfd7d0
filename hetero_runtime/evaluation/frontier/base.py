"""What a frontier is made of."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from hetero_runtime.errors import ConfigError
from hetero_runtime.evaluation.divergence import Divergence
from hetero_runtime.evaluation.perplexity import Perplexity
from hetero_scheduler.routing import RoutingPolicy, Shape


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
    divergence: Divergence | None
    """From the exact model, on text that this one wrote; None where no model ran."""
    perplexity: Perplexity | None
    """On held-out text; None where there was none."""
    inserted: float
    """Copies issued a layer ahead, for what the pre-gate inserts."""
    demanded: float
    """Copies that a layer waits for from its router on."""
    deviating: float
    """Share of the executed experts that the router would not have chosen."""
    engine_ms: float | None = None
    """What the engine took for a token on this machine; None where it was not timed."""

    @property
    def copies(self) -> float:
        """All of them."""
        return self.inserted + self.demanded

    @property
    def kl(self) -> float:
        """The divergence, nats a token. Only of a point that has one."""
        assert self.divergence is not None, f"{self.contender.name}: no model ran, so no divergence is known"
        return self.divergence.nats

    def to_json(self) -> dict[str, Any]:
        """One flat row."""
        return {
            "name": self.contender.name,
            "family": self.contender.family,
            "policy": self.contender.policy.name,
            "parameters": asdict(self.contender.policy),  # type: ignore[call-overload]
            "residency": self.residency,
            "capacity": self.capacity,
            "divergence": None if self.divergence is None else self.divergence.to_json(),
            "perplexity": None if self.perplexity is None else self.perplexity.perplexity,
            "copies": self.copies,
            "demand_copies": self.demanded,
            "prefetch_copies": self.inserted,
            "deviating": self.deviating,
            "engine_ms": self.engine_ms,
        }


def capacity_of(residency: float, shape: Shape) -> int:
    """Experts a layer that `residency` means. Raises ConfigError for less than top-k or more than all."""
    capacity = round(residency * shape.num_experts)
    if not shape.top_k <= capacity <= shape.num_experts:
        raise ConfigError(
            f"residency {residency:g} is {capacity} of a layer's {shape.num_experts} experts; a token needs "
            f"{shape.top_k} of them: give {shape.top_k / shape.num_experts:.3g} to 1"
        )
    return capacity
