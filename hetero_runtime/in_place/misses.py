"""The misses of a layer, between the device that loads them and the CPU that computes them where they lie.

begin     policy chooses ── CPU starts ─────────────────────┐
(device)  loads, hits, loaded experts, submitted meanwhile   │
finish    ◄──────────── the CPU's sum is added ──────────────┘

The bits of an answer depend on which experts the CPU computes, since it sums up in float32 and apart:

    policy               which experts those are depends on
    in_place             the requests before; with memory.slabs: 0 on nothing, all of them are the CPU's
    share                the requests before
    by_cost              timing as well

never on the number of workers. Requests that run at once change what is resident for each other, and copies
ahead, where they overlap with computation, arrive when they arrive.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from hetero_gpu import SlabCache
from hetero_gpu.stopwatch import Stopwatch
from hetero_runtime.experts.compute import Dispatch, LayerSum
from hetero_runtime.in_place.base import Floats, InPlaceExperts, Integers
from hetero_runtime.in_place.cores import beside_workers
from hetero_runtime.in_place.work import part_of
from hetero_scheduler import EvictionPolicy, ExpertKey, Lookup
from hetero_scheduler.counters import Counters
from hetero_scheduler.misses import LayerDemand, MissPolicy

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class InPlaceStats(Counters):
    """Experts computed in place (each time one is), and the seconds that the CPU took for them."""

    experts: int = 0
    seconds: float = 0.0


class OnDevice(NamedTuple):
    """Tokens of the experts that the device computes in a layer."""

    hit_tokens: list[int]
    loaded_tokens: list[int]


class _Running(NamedTuple):
    """What the CPU computes: its rows of the layer, its experts' tokens; when it had begun, and how long it
    had taken to hand it over."""

    rows: Integers
    tokens: list[int]
    began: float
    handing_s: float


class InPlaceMisses:
    """See the module docstring. An expert computed in place is a miss that nothing is loaded for: slots and
    the eviction policy's scores stay as they are."""

    def __init__(
        self,
        experts: InPlaceExperts,
        policy: MissPolicy,
        *,
        cache: SlabCache,
        eviction: EvictionPolicy,
        stopwatch: Stopwatch[OnDevice],
    ) -> None:
        self.experts, self.policy = experts, policy
        self._cache, self._eviction = cache, eviction
        self._stopwatch = stopwatch
        self._score_before = eviction.score[0]
        self._on_device: OnDevice | None = None
        self._running: _Running | None = None
        self._stats = InPlaceStats()

    def beside_torch(self) -> AbstractContextManager[None]:
        """Around a pass: this thread's torch leaves their cores to the workers."""
        return beside_workers(self.experts.num_workers)

    def remember(self, layer: int) -> None:
        """What the eviction policy says of the layer's experts before it hears which of them are used now."""
        self._score_before = self._eviction.score[layer].copy()

    def begin(self, needed: list[ExpertKey], total: LayerSum) -> Sequence[int]:
        """Choose and start, after `remember`. `needed`: the layer's experts, ascending. Returns the positions
        of those that are left to the device."""
        if self.policy.is_lost:
            return range(len(needed))
        for lap in self._stopwatch.laps():
            self.policy.observe_device(*lap.what, lap.seconds)
        tokens = np.diff(total.dispatch.bounds).tolist()
        misses = {i for i, key in enumerate(needed) if self._cache.lookup(key) is Lookup.MISS}
        hit_tokens = [count for i, count in enumerate(tokens) if i not in misses]
        chosen = self._choose(needed[0].layer, sorted(misses), hit_tokens, total) if misses else set[int]()
        self._on_device = OnDevice(hit_tokens, [tokens[i] for i in sorted(misses - chosen)])
        self._stopwatch.start()
        return [i for i in range(len(needed)) if i not in chosen]

    def finish(self, total: LayerSum) -> None:
        """The device's share is submitted: add the CPU's to it. Raises what went wrong on the CPU."""
        on_device, self._on_device = self._on_device, None
        if on_device is not None and total.dispatch.num_tokens == 1:
            self._stopwatch.stop(on_device)  # a prompt's layer copies ahead for the next one too
        if self._running is None:
            return
        running, self._running = self._running, None
        began = time.perf_counter()
        done = self.experts.wait()
        total.add_rows(running.rows, done.total)
        self._stats += InPlaceStats(len(running.tokens), done.seconds)
        self.policy.observe_in_place(running.tokens, done.seconds)
        adding_s = time.perf_counter() - max(began, running.began + done.seconds)
        self.policy.observe_call(running.handing_s + max(0.0, adding_s))

    def settle(self) -> None:
        """After a pass was given up half-way: nothing is under way. What the CPU has to say about the layer
        is of no use, an error neither: the one that ended the pass is on its way to the caller."""
        running, self._running = self._running, None
        if running is not None:
            try:
                self.experts.wait()
            except Exception as error:
                log.warning("computing experts on the CPU failed in a pass that was given up: %s", error)

    def stats(self) -> InPlaceStats:
        """Since the engine began."""
        return replace(self._stats)

    def close(self) -> None:
        """End the workers."""
        self.experts.close()

    def _choose(self, layer: int, misses: list[int], hit_tokens: list[int], total: LayerSum) -> set[int]:
        """Those of `misses`, positions of the layer's experts, that the CPU has begun to compute."""
        weights, dispatch = total.host_weights(), total.dispatch
        missed = np.array(misses)
        demand = LayerDemand(
            hit_tokens,
            np.diff(dispatch.bounds)[missed].tolist(),
            self._worth(layer, missed, dispatch, weights),
            self._cache.num_empty(layer),
        )
        chosen = self.policy.choose(demand)
        if chosen:
            self._start(layer, missed[chosen], total, weights)
        return {misses[position] for position in chosen}

    def _worth(self, layer: int, misses: Integers, dispatch: Dispatch, weights: Floats) -> list[int]:
        """Ranks: by the score that the eviction policy gives an expert, then by the one that it had before
        this use (to LRU all are used now, and whose last use is longest ago is least likely to be used again
        soon), then by the router's weights."""
        experts = dispatch.experts[misses]
        scores = list(zip(self._eviction.score[layer, experts], self._score_before[experts], strict=True))
        flat = weights.T.reshape(-1)[dispatch.order]
        by_router = np.add.reduceat(flat, dispatch.bounds[:-1])[misses].tolist()
        ranks = [0] * len(scores)
        for rank, i in enumerate(sorted(range(len(scores)), key=lambda i: (scores[i], by_router[i]))):
            ranks[i] = rank
        return ranks

    def _start(self, layer: int, chosen: Integers, total: LayerSum, weights: Floats) -> None:
        began = time.perf_counter()
        part = part_of(total.dispatch, chosen, layer=layer, hidden=total.hidden, weights=weights)
        self.experts.submit(part.work)
        now = time.perf_counter()
        self._running = _Running(part.rows, np.diff(part.work.bounds).tolist(), now, now - began)
