"""Algorithm 1 of PSR in plain Python: sets, sorting, one obvious line for each line of the paper.

Slow, and used by tests alone: `scan.py` must make the same decisions.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from hetero_scheduler.routing.base import RoutingPolicy, Shape
from hetero_scheduler.routing.calibration import Calibration
from hetero_scheduler.routing.scan import FAST_DECAY, FAST_GAIN, SLOW_DECAY, SLOW_GAIN

Floats = npt.NDArray[np.float32]


class LayerReference:
    """One layer of a logical cache. The paper's R is `resident`, B `guarded`, S `chosen`."""

    def __init__(
        self, policy: RoutingPolicy, shape: Shape, layer: int, *, capacity: int, calibration: Calibration
    ) -> None:
        self.rules, self.top_k, self.num_experts = policy.rules, shape.top_k, shape.num_experts
        self.calibration, self.layer = calibration, layer
        self.resident = set(np.flatnonzero(calibration.warm_set(capacity)[layer]).tolist())
        self.fast = np.zeros(self.num_experts, np.float32)
        self.slow = np.zeros(self.num_experts, np.float32)
        self.last_use = np.zeros(self.num_experts, np.float32)
        self.ranges: list[float] = []
        self.num_steps = 0

    def step(self, z: Floats, own: list[int], g: Floats | None, token: int) -> list[int]:
        """What token t executes, as a list in ascending order."""
        p = self._priorities(token)
        ranking = [] if g is None else self._ranking(g)
        guarded, inserted = self._insert(ranking, p)
        chosen = self._select(z, own, ranking)
        for e in sorted(chosen - self.resident):
            candidates = self.resident - chosen - guarded or self.resident - chosen
            self.resident.remove(_least(p, candidates))
            self.resident.add(e)
        self._observe(own, chosen | inserted)
        return sorted(chosen)

    def _priorities(self, token: int) -> Floats:
        if self.rules.is_lru:
            return self.last_use.copy()
        prior = self.calibration.prior
        row = prior.row(token)
        p: Floats = self.fast + self.slow + prior.share[row, self.layer].astype(np.float32) / np.float32(256)
        return p

    def _ranking(self, g: Floats) -> list[int]:
        """Experts from the best on, ties to the lowest, without those that the router excludes."""
        return [e for e in np.argsort(-g, kind="stable").tolist() if g[e] != -np.inf]

    def _insert(self, ranking: list[int], p: Floats) -> tuple[set[int], set[int]]:
        """Part 1: what is guarded, and what of it is new."""
        guarded: set[int] = set()
        new: set[int] = set()
        for e in ranking[: self.rules.window]:
            if e in self.resident:
                guarded.add(e)
            elif len(new) < self.rules.insertions and self.resident - guarded:
                self.resident.remove(_least(p, self.resident - guarded))
                self.resident.add(e)
                guarded.add(e)
                new.add(e)
        return guarded, new

    def _select(self, z: Floats, own: list[int], ranking: list[int]) -> set[int]:
        """Part 2, the choice."""
        place = {e: k for k, e in enumerate(own)}

        def by_router(e: int) -> tuple[float, int, int]:
            return (-float(z[e]), place.get(e, self.top_k), e)

        eligible = [e for e in range(self.num_experts) if z[e] != -np.inf or e in place]
        self.ranges.append(float(np.max(z[z != -np.inf])) - float(np.min(z[z != -np.inf])))
        if self.rules.executes_guess and len(ranking) >= self.top_k:
            return set(ranking[: self.top_k])
        favoured = self.resident | set(sorted(eligible, key=by_router)[: self.rules.protected])
        bonus = self._bonus()
        biased = {e: z[e] + bonus if e in favoured else z[e] for e in eligible}
        return set(sorted(eligible, key=lambda e: (-float(biased[e]), *by_router(e)))[: self.top_k])

    def _bonus(self) -> np.float32:
        if self.rules.is_running:
            return np.float32(self.rules.bonus * (sum(self.ranges) / len(self.ranges)))
        return np.float32(self.rules.bonus * self.calibration.score_range[self.layer])

    def _observe(self, own: list[int], used: set[int]) -> None:
        self.num_steps += 1
        self.last_use[list(used)] = self.num_steps
        wanted = np.zeros(self.num_experts, np.float32)
        wanted[own] = 1
        self.fast = (self.fast + FAST_GAIN * wanted) * FAST_DECAY
        self.slow = (self.slow + SLOW_GAIN * wanted) * SLOW_DECAY


def _least(p: Floats, experts: Iterable[int]) -> int:
    """Of least priority, ties to the lowest index."""
    return min(experts, key=lambda e: (float(p[e]), e))
