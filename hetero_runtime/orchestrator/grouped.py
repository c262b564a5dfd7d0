"""The grouped orchestrator: a prompt through its experts in a few launches a layer, the link never idle.

One layer of a prompt; the host waits once, for the token counts, while the device executes what is resident:

    link      … ─ fetched ahead for l ─── missing of l, hottest first ─── ahead for l+1, l+2 … ───────────
    compute   sort ─ residents ── what has arrived ── most of the rest ── most of that … ── sum ── layer l+1
    host      ───────── counts! ─ loads, waves, prefetches: submitted, none of them waited for ──

Copies arrive in the order of their submission, so a wave waits for the last of its experts only. Once a wave
is submitted its slots may be loaded again: the copies start when the wave has read them. What gives way,
and what is fetched ahead, is for `PromptScan` to say: not the policy's recency, which would throw away what
the next layers need, but Belady's order as far as it is known, by popularity or, where somebody `foresees`,
by a forecast after each layer; the policy only watches.

The kernels add up in their own order, so the result equals transformers' up to rounding, not in every bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from hetero_gpu import CacheStats, SlabCache, SlabPool
from hetero_gpu.experts.layer_numbers import LayerNumbers
from hetero_gpu.experts.prefill import GroupedExperts
from hetero_runtime.orchestrator.ahead import PredictionStats
from hetero_runtime.orchestrator.base import Orchestrator, Phase
from hetero_scheduler import EvictionPolicy, ExpertKey, Popularity
from hetero_scheduler.predict import Forecast
from hetero_scheduler.prompt_scan import PromptScan

Counts = npt.NDArray[np.int64]


class ForeseesPrompts(Protocol):
    """Somebody who says, layer by layer, what comes next in a prompt."""

    def decided(self, layer: int, tokens_per_expert: Counts) -> None:
        """`layer` has routed all tokens: each expert gets that many of them, `[num_experts]`. Waits for
        nothing."""

    def forecast(self, layer: int) -> Forecast | None:
        """What it says of the layers that follow `layer`, which decided last. Waits for the device."""

    def stats(self) -> PredictionStats:
        """What that has cost so far."""


AHEAD_BYTES = 256 << 20
"""Prefetched bytes on the link at once, about 5 ms of PCIe 5: the link has work until the next layer knows
what it needs, and what that layer misses does not wait long behind it."""
_MOST_SPARE = 32
"""Slots with which copies and waves follow each other without gaps, where layers to come hold all others."""
_LAST_WAVE = 6
"""Experts that are not worth two waves: they take the device less time than one copy takes the link."""


class GroupedOrchestrator(Orchestrator):
    """Prefill only; see the module docstring.

    `experts`: its `max_tokens` bound the workspace, and longer prompts run each layer in chunks, which count
    in the stats as passes of their own. `popularity`: profiled, and counted on from here.
    `is_fetching_ahead`: whether layers to come are prefetched. `foresees`: who forecasts them; None leaves it
    to popularity.
    """

    def __init__(
        self,
        cache: SlabCache,
        *,
        slabs: SlabPool,
        experts: GroupedExperts,
        eviction: EvictionPolicy,
        popularity: Popularity,
        is_fetching_ahead: bool,
        foresees: ForeseesPrompts | None = None,
    ) -> None:
        self._cache, self._slabs, self._experts, self._eviction = cache, slabs, experts, eviction
        self._num_layers, self._num_experts = eviction.score.shape
        self._popularity = popularity
        self._numbers = LayerNumbers(self._num_experts, slabs.memory.device)
        self._is_fetching_ahead, self._foresees = is_fetching_ahead, foresees
        self._scan: PromptScan | None = None
        self._checkpoint: Callable[[], None] = _go_on

    @contextmanager
    def pass_(self, phase: Phase, *, checkpoint: Callable[[], None]) -> Iterator[None]:
        assert phase is Phase.PREFILL, f"grouped experts are for prompts, not for {phase.value}"
        self._checkpoint, self._scan = checkpoint, None
        try:
            yield
        except BaseException:
            self._cache.settle()
            raise
        finally:
            self._checkpoint, self._scan = _go_on, None

    def expect_prompt(self, num_tokens: int) -> None:
        self._scan = PromptScan(self._popularity, num_tokens=num_tokens, top_k=self._experts.top_k)
        if self._is_fetching_ahead:
            self._fetch_ahead(self._scan)

    def run_layer(
        self, layer: int, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        self._checkpoint()
        num_tokens, top_k = top_k_index.shape
        self._scan = self._scan or PromptScan(self._popularity, num_tokens=num_tokens, top_k=top_k)
        out = torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device)
        total = np.zeros(self._num_experts, dtype=np.int64)
        for begin in range(0, num_tokens, self._experts.max_tokens):
            part = slice(begin, begin + self._experts.max_tokens)
            self._experts.begin(
                hidden[part], top_k_index[part], top_k_weights[part], num_experts=self._num_experts
            )
            self._execute(layer, self._scan, total=total, is_last=part.stop >= num_tokens)
            self._experts.finish(out[part])
        self._eviction.observe(layer, total)
        self._popularity.observe(layer, total)
        self._foresee(self._scan)
        if self._is_fetching_ahead:
            self._fetch_ahead(self._scan)
        return out

    def device_stats(self) -> CacheStats:
        return CacheStats()

    def prediction_stats(self) -> PredictionStats:
        return PredictionStats() if self._foresees is None else self._foresees.stats()

    def check(self) -> None:
        self._cache.check()

    # ---- stages of one layer

    def _execute(self, layer: int, scan: PromptScan, *, total: Counts, is_last: bool) -> None:
        """Submit every wave of the tokens that have begun. `total`: grows by the tokens of each expert."""
        self._numbers.ask(self._experts.bounds)
        residents = self._cache.residents(layer)
        self._launch(layer, residents)  # needed or not: an expert without tokens takes no time
        tokens = self._numbers.tokens_per_expert()
        total += tokens
        if is_last and self._foresees is not None:
            self._foresees.decided(layer, total)  # before the waves, which wait for copies
        scan.begin(layer, tokens, is_last=is_last)
        self._cache.begin_layer(layer, frozenset(_keys(layer, np.flatnonzero(tokens))))
        is_awaited = tokens > 0
        is_awaited[residents] = False
        scan.mark_executed(residents[tokens[residents] > 0])
        here = self._cache.residents(layer)  # prefetches that have arrived meanwhile
        self._wave(scan, here[is_awaited[here]])
        is_awaited[here] = False
        self._load_and_execute(scan, is_awaited, tokens)

    def _load_and_execute(self, scan: PromptScan, is_awaited: npt.NDArray[np.bool_], tokens: Counts) -> None:
        """The awaited experts, which are on the link or not even that."""
        is_absent = self._cache.absent(scan.layer)
        on_the_way = np.flatnonzero(is_awaited & ~is_absent)
        waiting = [key.expert for key in self._cache.by_arrival(_keys(scan.layer, on_the_way))]
        missing = np.flatnonzero(is_awaited & is_absent)
        for expert in missing[np.argsort(-tokens[missing], kind="stable")].tolist():
            while not self._load(ExpertKey(scan.layer, expert), scan, num_waiting=len(waiting)):
                self._next_wave(scan, waiting)
            waiting.append(expert)
        while waiting:
            self._next_wave(scan, waiting)

    def _load(self, key: ExpertKey, scan: PromptScan, *, num_waiting: int) -> bool:
        """False when a wave of the `num_waiting` experts submitted before should make room first."""
        if self._cache.load(key, score=scan.score):
            return True
        if num_waiting >= self._spare(key.layer):
            return False
        is_loading = self._cache.load(key, score=scan.last_resort())
        assert is_loading or num_waiting, f"no slot can be freed for {key}: {self._cache.counts()}"
        return is_loading

    def _next_wave(self, scan: PromptScan, waiting: list[int]) -> None:
        """Execute the two thirds of `waiting` that arrive first, and take them off; of a few, all."""
        num = len(waiting) if len(waiting) <= _LAST_WAVE else 2 * len(waiting) // 3
        self._wave(scan, np.array(waiting[:num]))
        del waiting[:num]

    def _wave(self, scan: PromptScan, experts: Counts) -> None:
        self._launch(scan.layer, experts)
        scan.mark_executed(experts)

    def _launch(self, layer: int, experts: Counts) -> None:
        """Execute `experts`, resident or on their way, and give their slots free."""
        if not len(experts):
            return
        keys = _keys(layer, experts)
        self._cache.wait_all(keys)
        slots = self._cache.slots(layer, experts)
        self._experts.add(self._slabs.memory, *self._numbers.send(experts, slots))
        self._cache.release(keys)

    def _foresee(self, scan: PromptScan) -> None:
        """Hear what the layers to come will want, if any of it may have to be fetched."""
        if self._foresees is None or self._cache.present()[scan.layer + 1 :].all():
            return
        forecast = self._foresees.forecast(scan.layer)
        if forecast is not None:
            self._eviction.observe_forecast(forecast)
            scan.foresee(forecast.layers, forecast.probabilities[0])

    def _fetch_ahead(self, scan: PromptScan) -> None:
        """Prefetch what the next layers probably need, the nearest first, until the link has enough to do."""
        room = max(1, AHEAD_BYTES // self._slabs.record_bytes) - self._cache.num_on_the_way()
        for layer in range(scan.layer + 1, self._num_layers):
            expected = scan.expected(layer)
            wanted = expected[self._cache.absent(layer)[expected]]
            if not len(wanted):
                continue
            budget = min(room, self._cache.num_available(layer) - self._spare(layer))
            for key in _keys(layer, wanted[: max(0, budget)]):
                if not self._cache.prefetch(key, score=scan.score):
                    break
                room -= 1
            if room <= 0:
                return

    def _spare(self, layer: int) -> int:
        return max(1, min(_MOST_SPARE, self._cache.pool_size(layer) // 8))


def _keys(layer: int, experts: Counts) -> list[ExpertKey]:
    return [ExpertKey(layer, expert) for expert in experts.tolist()]


def _go_on() -> None:
    return
