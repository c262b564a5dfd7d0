"""What a replay found, with what says whether its hit rate means something."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hetero_scheduler.counters import Counters
from hetero_scheduler.simulator.scenario import Scenario

_REPORTED = (
    *("tokens", "num_slots", "hit_rate", "static_hit_rate", "load_entropy", "precision"),
    *("bytes_moved", "bytes_wasted", "full_load_share", "tok_s", "link_share"),
)


@dataclass
class Counts(Counters):
    """Sums over tokens. required = hits + late + misses, in (token, layer, expert)."""

    required: int = 0
    hits: int = 0
    """Resident before any on-demand load of the layer."""
    late: int = 0
    """Prefetched, but not arrived when the layer needed them."""
    misses: int = 0
    """Loaded on demand."""
    prefetches: int = 0
    prefetches_used: int = 0
    """Prefetched experts that were required before they left."""
    prefetches_wasted: int = 0
    """Prefetched experts that left, or were given up on the link, before anything required them."""
    forecasts: int = 0
    stall_ms: float = 0.0
    """Time that layers waited for copies."""


@dataclass(frozen=True, kw_only=True)
class SimulationResult:
    """One replay of one trace."""

    scenario: Scenario
    tokens: int
    """Tokens counted."""
    num_layers: int
    num_slots: int
    counts: Counts
    static_hit_rate: float
    """Hits of a cache that never changes and knew the most used experts of the counted tokens in advance. A
    policy that does not beat it has learnt nothing from the order of the tokens."""
    load_entropy: float
    """1 when all experts are used alike; far below, a high hit rate is no merit."""

    @property
    def hit_rate(self) -> float:
        """Share of required experts that were resident before any on-demand load of their layer."""
        return self.counts.hits / self.counts.required

    @property
    def precision(self) -> float:
        """Share of the prefetches whose fate is known that were required; 1 when there were none."""
        known = self.counts.prefetches_used + self.counts.prefetches_wasted
        return self.counts.prefetches_used / known if known else 1.0

    @property
    def bytes_moved(self) -> int:
        """All copies, on demand and ahead."""
        return (self.counts.misses + self.counts.prefetches) * self.scenario.machine.record_bytes

    @property
    def bytes_wasted(self) -> int:
        """Prefetched and never required."""
        return self.counts.prefetches_wasted * self.scenario.machine.record_bytes

    @property
    def full_load_ms(self) -> float:
        """Time of the counted tokens with every expert resident and nothing to predict."""
        return self.tokens * self.num_layers * self.scenario.machine.layer_ms

    @property
    def elapsed_ms(self) -> float:
        """Time of the counted tokens, forecasts and stalls included."""
        forecast_ms = self.counts.forecasts * self.scenario.machine.forecast_ms
        return self.full_load_ms + forecast_ms + self.counts.stall_ms

    @property
    def full_load_share(self) -> float:
        """Tokens a second as a share of the same machine with every expert resident."""
        return self.full_load_ms / self.elapsed_ms

    @property
    def tok_s(self) -> float:
        """Estimated tokens a second."""
        return 1e3 * self.tokens / self.elapsed_ms

    @property
    def link_share(self) -> float:
        """Share of the time that the link moves experts."""
        num_copies = self.counts.misses + self.counts.prefetches
        return num_copies * self.scenario.machine.record_ms / self.elapsed_ms

    def to_json(self) -> dict[str, Any]:
        """One flat row of plain numbers and names."""
        scenario = asdict(self.scenario)
        machine = scenario.pop("machine")
        found = {name: getattr(self, name) for name in _REPORTED}
        return {**scenario, **machine, **found, **asdict(self.counts)}


def static_hit_rate(load: npt.NDArray[np.float64], pools: list[range]) -> float:
    """Hits of the best cache that never changes.

    `load`: uses of each expert, `[layers, experts]`; `pools`: slots that each layer may use.
    """
    is_shared = len(set(pools)) == 1
    parts = [load.reshape(-1)] if is_shared else list(load)
    kept = sum(np.sort(part)[::-1][: len(pool)].sum() for part, pool in zip(parts, pools, strict=False))
    return float(kept / load.sum())
