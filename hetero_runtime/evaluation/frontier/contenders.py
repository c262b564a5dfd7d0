"""Policies to sweep, by name (PSR §6.1, baselines; Appendix B)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hetero_runtime.errors import ConfigError
from hetero_runtime.evaluation.frontier.base import Contender
from hetero_scheduler.routing import RoutingPolicy, make_routing_policy

_CACHE_PRIORS = ("cache_prior", "cache_prior_a", "cache_prior_2")
FAMILIES = ("exact", "exact_a", *_CACHE_PRIORS, "psr", "speculative_experts")
"""exact, exact_a: the router's choice, with LRU and with the A priority. cache_prior, cache_prior_a: a bonus
on what is resident, likewise. cache_prior_2: as published, the router's best two kept and the running range.
psr, speculative_experts: with each number of insertions and each window."""


@dataclass(frozen=True)
class Grid:
    """What is swept; a family takes the product of the parameters that it has."""

    families: tuple[str, ...] = ("exact", "exact_a", "cache_prior", "psr")
    bonuses: tuple[float, ...] = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4)
    """lambda"""
    insertions: tuple[int, ...] = (1, 2)
    """n"""
    windows: tuple[int, ...] = (2,)
    """Candidates of the pre-gate."""

    def contenders(self) -> list[Contender]:
        """All of them. Raises ConfigError for a family that is none, or a value that a policy refuses."""
        unknown = sorted(set(self.families) - set(FAMILIES))
        if unknown:
            raise ConfigError(f"unknown policy {', '.join(unknown)}; known: {', '.join(FAMILIES)}")
        try:
            return [contender for family in self.families for contender in self._of(family)]
        except ValueError as error:
            raise ConfigError(str(error)) from error

    def _of(self, family: str) -> Iterator[Contender]:
        if family.startswith("exact"):
            yield Contender(_policy("exact", priority=_priority(family)), _spoken(family), None)
        elif family == "cache_prior_2":
            for bonus in self.bonuses:
                policy = _policy("cache_prior", bonus=bonus, protected=2, range="running")
                yield Contender(policy, "cache-prior, best 2 kept", bonus)
        elif family in _CACHE_PRIORS:
            for bonus in self.bonuses:
                policy = _policy("cache_prior", bonus=bonus, priority=_priority(family))
                yield Contender(policy, _spoken(family), bonus)
        else:
            yield from self._steered(family)

    def _steered(self, family: str) -> Iterator[Contender]:
        bonuses: Sequence[float | None] = self.bonuses if family == "psr" else (None,)
        for insertions in self.insertions:
            for window in self.windows:
                for bonus in bonuses:
                    given = {} if bonus is None else {"bonus": bonus}
                    policy = _policy(family, insertions=insertions, window=window, **given)
                    named = "psr" if family == "psr" else "speculative"
                    yield Contender(policy, f"{named} n={insertions} w={window}", bonus)


def _policy(name: str, **parameters: object) -> RoutingPolicy:
    return make_routing_policy(name, **parameters)


def _priority(family: str) -> str:
    return "a" if family.endswith("_a") else "lru"


def _spoken(family: str) -> str:
    """`cache-prior, A` for cache_prior_a."""
    name = family.removesuffix("_a").replace("_", "-")
    return f"{name}, {'A' if family.endswith('_a') else 'LRU'}"
