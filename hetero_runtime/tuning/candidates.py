"""What `preset: auto` chooses from: what the user wrote stays, and alternatives lie beneath it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hetero_runtime.config import Config
from hetero_runtime.config.presets import PRESETS
from hetero_runtime.errors import ConfigError
from hetero_runtime.tuning.base import Candidate

Sections = Mapping[str, Mapping[str, Any]]

EXACT: Mapping[str, Sections] = {
    "lfru": {"eviction": {"policy": "lfru"}},
    "seqmoe": PRESETS["seqmoe"],
    "misses split": {"misses": {"handler": "hybrid"}},
    "misses on the CPU": {"misses": {"handler": "cpu"}},
}
"""The same model in other ways, those that load fastest first: a time limit ends with the last ones."""
BONUSES = (0.1, 0.2, 0.3)
"""Of prefetch-steered routing, where some divergence is allowed: the farther the faster (PSR §6.2)."""


def find_candidates(make: Callable[[Sections], Config]) -> list[Candidate]:
    """Different configurations, one at least; the first is what works without measuring.

    `make` gives the configuration with sections beneath what the user wrote, so that whatever stands there
    wins. It may raise ConfigError: what contradicts the user's keys is no candidate. The first stands alone
    where the user deviates from exact routing, which would be the measure.
    """
    first = Candidate("lru", make({}))
    if not first.is_exact:
        return [first]
    found = [first]
    for name, sections in [*_steered(first.config.routing.kl_budget), *EXACT.items()]:
        try:
            config = make(sections)
        except ConfigError:
            continue
        if all(config != candidate.config for candidate in found):
            found.append(Candidate(name, config))
    return found


def _steered(kl_budget: float) -> list[tuple[str, Sections]]:
    if kl_budget == 0:
        return []
    psr = PRESETS["psr"]
    return [
        (f"psr, bonus {bonus}", {**psr, "routing": {**psr["routing"], "bonus": bonus}}) for bonus in BONUSES
    ]
