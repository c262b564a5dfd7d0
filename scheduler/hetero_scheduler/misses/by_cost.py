"""Misses are split so that link and CPU finish together, by measured costs (VisMMOE's hybrid mode, §4)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from hetero_scheduler.misses.base import LayerDemand, MissPolicy
from hetero_scheduler.misses.costs import Costs
from hetero_scheduler.misses.split import least_worth, split_by_cost

PATIENCE = 1024
"""Layers with misses, one after another, that the CPU could help none of, before it is given up: some
twenty tokens of a big model, so that one bad moment of the machine does not decide."""


class Verdict(NamedTuple):
    """Why the CPU is given up: seconds of one expert of one token, each way."""

    in_place_s: float
    load_s: float


class ByCost(MissPolicy):
    """See `split`. `on_lost` is called once, when the CPU helped no layer for so long that it is given up;
    after that everything is loaded."""

    is_tried = True

    def __init__(self, costs: Costs, *, on_lost: Callable[[Verdict], None]) -> None:
        self.costs, self._on_lost = costs, on_lost
        self._num_unhelped = 0
        self.is_lost = False

    def choose(self, demand: LayerDemand) -> list[int]:
        if self.is_lost or len(demand.miss_tokens) <= demand.num_empty:
            return []
        chosen = self._split(demand)
        self._num_unhelped = 0 if chosen else self._num_unhelped + 1
        if self._num_unhelped >= PATIENCE:
            self._give_up()
        return chosen

    def _give_up(self) -> None:
        self.is_lost = True
        (in_place_s,) = self.costs.in_place_s([1])
        self._on_lost(Verdict(in_place_s + self.costs.call_s, self.costs.load_s()))

    def _split(self, demand: LayerDemand) -> list[int]:
        num_loaded = min(demand.num_empty, len(demand.miss_tokens))
        free = least_worth(len(demand.miss_tokens) - num_loaded, demand.worth)
        chosen = split_by_cost(
            self.costs.in_place_s([demand.miss_tokens[i] for i in free]),
            self.costs.device_s(demand.hit_tokens, demand.miss_tokens)[num_loaded:],
            [demand.worth[i] for i in free],
            call_s=self.costs.call_s,
        )
        return [free[position] for position in chosen]

    def observe_in_place(self, tokens: Sequence[int], seconds: float) -> None:
        self.costs.observe_in_place(tokens, seconds)

    def observe_call(self, seconds: float) -> None:
        self.costs.observe_call(seconds)

    def observe_device(self, hit_tokens: Sequence[int], loaded_tokens: Sequence[int], seconds: float) -> None:
        if len(hit_tokens) + len(loaded_tokens):
            self.costs.observe_device(hit_tokens, loaded_tokens, seconds)
