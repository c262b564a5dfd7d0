"""What is simulated: a cache, policies for it, and the times of a machine."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Literal

Pool = Literal["global", "per_layer"]


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Times of the machine that is imagined."""

    layer_ms: float = 0.1
    """From one layer's experts to the next layer's, with everything resident."""
    record_bytes: int = 9_437_184
    """Bytes of one expert (the default is bf16 Qwen3-30B-A3B)."""
    link_gb_s: float = 55.0
    """10^9 bytes a second from where all experts are to where they are computed."""
    copies_in_flight: int = 1
    """Prefetches given to the link and not arrived yet, at most."""
    overtakes: bool = False
    """Whether what a layer demands goes before the copy on the link as well, which goes on afterwards: so do
    captured steps, whose prefetches cross in pieces. Else that copy is finished first."""
    forecast_ms: float = 0.0
    """What each forecast adds to the layer after which it is made."""

    def __post_init__(self) -> None:
        """Raise ValueError for a machine that cannot be."""
        for name in ("layer_ms", "record_bytes", "link_gb_s", "copies_in_flight"):
            if not (getattr(self, name) > 0 and math.isfinite(getattr(self, name))):
                raise ValueError(f"{name} is {getattr(self, name)}; it must be above 0")
        if not (self.forecast_ms >= 0 and math.isfinite(self.forecast_ms)):
            raise ValueError(f"forecast_ms is {self.forecast_ms}; it must be 0 or more")

    @property
    def record_ms(self) -> float:
        """What one expert takes on the link."""
        return self.record_bytes / self.link_gb_s / 1e6


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One replay: a cache of `residency` under three policies, on `machine`."""

    eviction: str = "lru"
    schedule: str = "none"
    predictor: str = "none"
    extra: int = 3
    """Prefetch tasks of a layer beyond the router's top-k (the paper's k' - k)."""
    residency: float = 0.25
    """Slots as a share of all routed experts."""
    pool: Pool = "global"
    """Whether slots serve any layer, or each layer has its own."""
    uncounted: float = 0.1
    """Share of the tokens, from the start, that run before anything is counted."""
    machine: Machine = field(default_factory=Machine)

    def __post_init__(self) -> None:
        """Raise ValueError for shares that are none."""
        if not 0 < self.residency <= 1:
            raise ValueError(f"residency is {self.residency}; it must be above 0 and at most 1")
        if not 0 <= self.uncounted < 1:
            raise ValueError(f"uncounted is {self.uncounted}; it must be at least 0 and below 1")
        if self.extra < 0:
            raise ValueError(f"extra is {self.extra}; it must be 0 or more")
        if self.pool not in ("global", "per_layer"):
            raise ValueError(f"unknown pool {self.pool!r}; known: global, per_layer")

    def layer_slots(self, *, num_layers: int, num_experts: int, top_k: int) -> list[int]:
        """Slots of each layer, the engine's own counts: rounded down, and every layer alike where each has
        its own. Raises ValueError when a token's experts of a layer do not fit."""
        total = math.floor(self.residency * num_layers * num_experts + 1e-6)
        if self.pool == "per_layer":
            total = total // num_layers * num_layers
        share, extra = divmod(total, num_layers)
        if (total if self.pool == "global" else share) < top_k:
            raise ValueError(
                f"residency {self.residency} leaves fewer slots than the {top_k} that a layer needs"
            )
        return [share + (layer < extra) for layer in range(num_layers)]


def pool_ranges(layer_slots: list[int], pool: Pool) -> list[range]:
    """The slots that each layer may use."""
    if pool == "global":
        return [range(sum(layer_slots))] * len(layer_slots)
    return [range(end - size, end) for end, size in zip(accumulate(layer_slots), layer_slots, strict=True)]
