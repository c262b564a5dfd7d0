"""The reference replay: a recorded routing through the engine's own policies, one layer after the other.

    router of l known                                             router of l + 1 known
    │ land, count, demand ── stall ──│ observe, forecast, prefetch while l runs │ land, count, demand …
                                     └───────────── layer_ms ──────────────────┘

The slot machine, the eviction score, the schedule and the predictor are the objects that serve; only copies
and time are imagined. The order within a layer is that of the slab cache's `begin_layer`, `load`, `release`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from hetero_scheduler.eviction import EvictionPolicy
from hetero_scheduler.keys import ExpertKey
from hetero_scheduler.predict import Forecast, Predictor
from hetero_scheduler.prefetch import Schedule, Task
from hetero_scheduler.prefetch.steering import Steering
from hetero_scheduler.simulator.clock import Copy, Link
from hetero_scheduler.simulator.result import Counts
from hetero_scheduler.simulator.scenario import Machine
from hetero_scheduler.slots import Lookup, SlotMachine, SlotState
from hetero_scheduler.trace import Trace


class Policies(NamedTuple):
    """Who decides. Without a predictor nothing is forecast, without a schedule nothing is prefetched."""

    eviction: EvictionPolicy
    schedule: Schedule | None = None
    predictor: Predictor | None = None
    extra: int = 3
    """Prefetch tasks of a layer beyond the router's top-k."""


class Replay:
    """One trace through one cache; `run` once."""

    def __init__(self, trace: Trace, *, slots: SlotMachine, policies: Policies, machine: Machine) -> None:
        self.slots = slots
        self.link = Link(machine.record_ms, depth=machine.copies_in_flight, overtakes=machine.overtakes)
        self.counts = Counts()
        self._trace, self.policies, self._machine = trace, policies, machine
        self._needed = np.sort(trace.topk, axis=-1).astype(np.int64)
        self._is_present = np.zeros((trace.num_layers, trace.num_experts), dtype=np.bool_)
        self._is_unproven = np.zeros_like(self._is_present)  # prefetched, and not required since
        self._under_way: dict[int, tuple[Task, float]] = {}  # by tag, with the position at its start
        self._fetching: set[ExpertKey] = set()
        self._steering = Steering(
            policies.schedule,
            policies.eviction,
            num_layers=trace.num_layers,
            per_layer=min(trace.top_k + policies.extra, trace.num_experts),
            is_shared=len({slots.pool_range(layer) for layer in range(trace.num_layers)}) == 1,
        )
        self.now_ms, self._position = 0.0, 0.0

    def run(self, first_counted: int = 0) -> Counts:
        """Replay all tokens; the counts are of those from `first_counted` on."""
        begins = set(self._trace.bounds[:-1].tolist())
        before = Counts()
        for step in range(self._trace.num_tokens):
            if step == first_counted:
                before = replace(self.counts)
            if step in begins:
                self._begin_document()
            self._begin_step(step)
            for layer in range(self._trace.num_layers):
                self.run_layer(step, layer)
        return self.counts - before

    def run_layer(self, step: int, layer: int) -> None:
        """One layer of one token: see the module docstring."""
        experts = self._needed[step, layer]
        keys = [ExpertKey(layer, expert) for expert in experts.tolist()]
        self._position = float(step * self._trace.num_layers + layer)
        self._land(self.link.arrive(self.now_ms))
        self.policies.eviction.observe(layer, np.bincount(experts, minlength=self._trace.num_experts))
        self._wait_for(keys)
        self._observe(step, layer)
        self._prefetch_until(self.now_ms + self._machine.layer_ms, running=keys)

    # ---- stages of one layer

    def _wait_for(self, keys: list[ExpertKey]) -> None:
        """Count, give up what comes too late for nothing, demand what is missing, and stall for it."""
        layer = keys[0].layer
        answers = [self.slots.lookup(key) for key in keys]
        missing = [key for key, answer in zip(keys, answers, strict=True) if answer is Lookup.MISS]
        late = {key for key, answer in zip(keys, answers, strict=True) if answer is Lookup.PENDING}
        self._count(keys, num_late=len(late), num_missing=len(missing))
        for key in [key for key in self._fetching if key.layer == layer and key not in late]:
            self._give_up(key)
        self.slots.release_layer(layer)
        for key in missing:
            self._reserve(key, SlotState.COMPUTE, protected=keys)
        done_ms, arrived = self.link.demand(len(missing), late=late, now_ms=self.now_ms)
        self._land(arrived)
        self.counts.stall_ms += done_ms - self.now_ms
        self.now_ms = done_ms
        self.slots.release_layer(layer)

    def _begin_step(self, step: int) -> None:
        """The step's token is known: what that lets the predictor say, the link may act upon at once."""
        predictor = self.policies.predictor
        if predictor is None:
            return
        if self._pass_on(predictor.begin_step(step, int(self._trace.tokens[step]))):
            self._land(self.link.arrive(self.now_ms))
            while self.link.has_room and self._start_next(step * self._trace.num_layers - 1, running=[]):
                pass

    def _observe(self, step: int, layer: int) -> None:
        """Tell the predictor what the router said, and what the next one says early; pass on what is new."""
        predictor = self.policies.predictor
        if predictor is None:
            return
        predictor.observe(step, layer, self._trace.logits[step, layer])
        self._pass_on(predictor.forecast())
        early, following = self._trace.early, layer + 1
        if predictor.asks_early and early is not None and following < self._trace.num_layers:
            self._pass_on(predictor.observe_next(step, following, early[step, following]))

    def _pass_on(self, forecast: Forecast | None) -> bool:
        """Whether there was a forecast to act upon."""
        if forecast is None:
            return False
        self.counts.forecasts += 1
        self.now_ms += self._machine.forecast_ms
        self._steering.take(forecast)
        return True

    def _prefetch_until(self, end_ms: float, *, running: list[ExpertKey]) -> None:
        """Time goes on to `end_ms`; whenever the link has room, the schedule says what it carries next."""
        begin_ms, pos = self.now_ms, int(self._position)
        while True:
            while self.link.has_room and self._start_next(pos, running):
                pass
            arrival_ms = self.link.next_arrival_ms
            if arrival_ms >= end_ms:
                break
            self.now_ms = arrival_ms
            self._position = pos + (arrival_ms - begin_ms) / (end_ms - begin_ms)
            self._land(self.link.arrive(arrival_ms))
        self.now_ms, self._position = end_ms, pos + 1.0

    # ---- one copy

    def _start_next(self, pos: int, running: list[ExpertKey]) -> bool:
        """Ask the schedule and start what it says. False when it says nothing, or nothing can be started."""
        task = self._steering.next(pos, is_present=self._is_present, has_slots=self._has_slots)
        if task is None:
            return False
        held = self._reserve(task.key, SlotState.FETCH, protected=running)
        if held is not None:
            self.link.submit(held, now_ms=self.now_ms)
            self._under_way[held.tag] = task, self._position
            self._fetching.add(task.key)
            self._is_unproven[task.key] = True
            self.counts.prefetches += 1
        return True

    def _has_slots(self, layer: int) -> bool:
        """Whether a prefetch leaves enough: a layer must always find slots for all its experts at once."""
        return self.slots.num_available(layer) > self._trace.top_k

    def _land(self, arrived: list[Copy]) -> None:
        """Copies have arrived; those whose slot was given away since are for nothing."""
        for copy in arrived:
            if self.slots.is_current(copy.slot, copy.tag):
                self.slots.land(copy.slot, copy.tag)
                self._fetching.discard(copy.key)
            task, began = self._under_way.pop(copy.tag)
            for other, (waiting, submitted) in self._under_way.items():
                self._under_way[other] = waiting, max(submitted, self._position)
            assert self.policies.schedule is not None, "a copy without a schedule arrived"
            self.policies.schedule.landed(task, self._position - began)

    def _give_up(self, key: ExpertKey) -> None:
        """The layer runs without this prefetch: its slot is free, the copy goes on over the link."""
        slot = self.slots.slot(key)
        self.slots.abort(slot, self.slots.tag(slot))
        self._fetching.discard(key)
        self._has_left(key)

    def _reserve(self, key: ExpertKey, state: SlotState, *, protected: list[ExpertKey]) -> Copy | None:
        eviction = self.policies.eviction
        score = eviction.prefetch_score if state is SlotState.FETCH else eviction.score
        held = self.slots.reserve(key, state, score=score, protected=protected)
        if held is None:
            assert state is SlotState.FETCH, f"no slot can be freed for {key}: {self.slots.counts()}"
            return None
        if held.evicted is not None:
            self._has_left(held.evicted)
        self._is_present[key] = True
        return Copy(key, held.slot, held.tag)

    # ---- accounts

    def _has_left(self, key: ExpertKey) -> None:
        self._is_present[key] = False
        self.counts.prefetches_wasted += int(self._is_unproven[key])
        self._is_unproven[key] = False

    def _count(self, keys: list[ExpertKey], *, num_late: int, num_missing: int) -> None:
        layer, experts = keys[0].layer, [key.expert for key in keys]
        self.counts.required += len(keys)
        self.counts.hits += len(keys) - num_late - num_missing
        self.counts.late += num_late
        self.counts.misses += num_missing
        self.counts.prefetches_used += int(np.count_nonzero(self._is_unproven[layer, experts]))
        self._is_unproven[layer, experts] = False

    def _begin_document(self) -> None:
        """Nothing is remembered from one document to the next, except by the cache."""
        if self.policies.predictor is not None:
            self.policies.predictor.reset()
        self._steering.clear()
