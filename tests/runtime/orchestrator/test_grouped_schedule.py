"""The grouped orchestrator's order of copies and waves, without kernels: any pools, any routing, failures."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_gpu import SlabCache, SlabPool
from hetero_gpu.experts.prefill import GroupedExperts
from hetero_runtime.orchestrator import Phase
from hetero_runtime.orchestrator import grouped as grouped_module
from hetero_runtime.orchestrator.ahead import PredictionStats
from hetero_runtime.orchestrator.grouped import GroupedOrchestrator
from hetero_scheduler import ExpertKey, Popularity, SlotMachine, make_eviction
from hetero_scheduler.predict import Forecast
from tests.gpu.fake_copier import FakeCopier

NUM_EXPERTS, TOP_K, RECORD = 6, 2, 16
CPU = torch.device("cpu")
Routing = list[list[int]]
"""Experts of each layer that a prompt uses."""


def record(key: ExpertKey) -> torch.Tensor:
    return torch.full((RECORD,), 16 * key.layer + key.expert, dtype=torch.uint8)


@dataclass
class WatchedExperts:
    """In place of kernels: every wave must find its experts' bytes, and a layer's waves all that it uses."""

    max_tokens: int
    layer: int = -1
    bounds: torch.Tensor = field(default_factory=lambda: torch.zeros(0))
    missing: set[int] = field(default_factory=set)
    num_waves: int = 0

    def begin(self, hidden: Any, experts: torch.Tensor, weights: Any, *, num_experts: int) -> None:
        assert not self.missing, f"layer {self.layer} went without experts {self.missing}"
        self.missing = set(experts.flatten().tolist())
        tokens = torch.bincount(experts.flatten(), minlength=num_experts)
        self.bounds = torch.nn.functional.pad(tokens.cumsum(0), (1, 0)).int()

    def add(self, slabs: torch.Tensor, experts: torch.Tensor, slots: torch.Tensor) -> None:
        self.num_waves += 1
        for expert, slot in zip(experts.tolist(), slots.tolist(), strict=True):
            assert torch.equal(slabs[slot], record(ExpertKey(self.layer, expert)))
            self.missing.discard(expert)

    def finish(self, out: torch.Tensor) -> None:
        assert not self.missing


class Rig:
    def __init__(self, layer_slots: list[int] | int, num_layers: int, *, max_tokens: int = 64) -> None:
        per_layer = layer_slots if isinstance(layer_slots, list) else None
        num_slots = sum(layer_slots) if isinstance(layer_slots, list) else layer_slots
        self.copier, self.experts = FakeCopier(), WatchedExperts(max_tokens)
        slabs = SlabPool(num_slots, RECORD, CPU)
        eviction = make_eviction("lru", num_layers=num_layers, num_experts=NUM_EXPERTS)
        self.cache = SlabCache(
            slabs=slabs,
            machine=SlotMachine(
                num_slots, num_layers=num_layers, num_experts=NUM_EXPERTS, layer_slots=per_layer
            ),
            eviction=eviction,
            copier=self.copier,
            record=record,
        )
        self.orchestrator = GroupedOrchestrator(
            self.cache,
            slabs=slabs,
            experts=cast(GroupedExperts, self.experts),
            eviction=eviction,
            popularity=Popularity(num_layers, NUM_EXPERTS),
            is_fetching_ahead=True,
        )

    def run(self, routing: Routing, *, fail_at_layer: int | None = None) -> None:
        with self.orchestrator.pass_(Phase.PREFILL, checkpoint=lambda: None):
            for layer, experts in enumerate(routing):
                self.experts.layer = layer
                if layer == fail_at_layer:
                    self.copier.fail_next = OSError("the link is down")
                index = torch.tensor(experts)[:, None].expand(-1, TOP_K)
                hidden = torch.zeros(len(experts), 4)
                self.orchestrator.run_layer(layer, hidden, index, torch.ones_like(index))
                for _ in range(layer % 3):
                    if self.copier.pending:
                        self.copier.arrive_next()

    def num_resident(self, routing: Routing) -> int:
        """Of the experts that a prompt uses."""
        return sum(len({*experts} & {*self.cache.residents(i).tolist()}) for i, experts in enumerate(routing))


def routings(num_layers: int) -> st.SearchStrategy[Routing]:
    experts = st.lists(st.integers(0, NUM_EXPERTS - 1), min_size=9, max_size=9)
    return st.lists(experts, min_size=num_layers, max_size=num_layers)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_every_wave_finds_its_bytes_whatever_fails(data: st.DataObject) -> None:
    num_layers = data.draw(st.integers(1, 4))
    sizes = st.lists(st.integers(1, NUM_EXPERTS), min_size=num_layers, max_size=num_layers)
    slots = data.draw(st.one_of(st.integers(1, 20), sizes))
    rig = Rig(slots, num_layers, max_tokens=data.draw(st.sampled_from([4, 64])))
    for routing in data.draw(st.lists(routings(num_layers), min_size=1, max_size=4)):
        failing = data.draw(st.one_of(st.none(), st.integers(0, num_layers - 1)))
        try:
            rig.run(routing, fail_at_layer=failing)
        except OSError:
            rig.experts.missing = set()
            assert rig.cache.counts().fetch == rig.cache.counts().compute == 0
        rig.copier.fail_next = None
        rig.orchestrator.check()


@settings(max_examples=60, deadline=None)
@given(
    prompts=st.lists(routings(4), min_size=1, max_size=4),
    num_slots=st.integers(NUM_EXPERTS, 4 * NUM_EXPERTS),
)
def test_without_guesses_a_prompt_loads_what_it_lacks_and_what_it_had_to_sacrifice(
    prompts: list[Routing], num_slots: int
) -> None:
    rig = Rig(num_slots, 4)
    rig.orchestrator._is_fetching_ahead = False
    for routing in prompts:
        lacking = sum(len({*experts}) for experts in routing) - rig.num_resident(routing)
        before = rig.cache.stats().loads
        rig.run(routing)
        spare = max(1, num_slots // 8)
        assert lacking <= rig.cache.stats().loads - before <= lacking + spare


def test_what_is_on_the_link_ahead_of_its_layer_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouped_module, "AHEAD_BYTES", 3 * RECORD)
    rig = Rig(4 * NUM_EXPERTS, 4)
    every = [[*range(NUM_EXPERTS)] * 9] * 4
    rig.run(every[:1])
    assert rig.cache.stats().prefetches == 3
    assert rig.cache.num_on_the_way() == 3


def test_a_few_awaited_experts_are_one_wave() -> None:
    rig = Rig(NUM_EXPERTS, 1)
    rig.run([[*range(NUM_EXPERTS)]])
    assert rig.experts.num_waves == 1
    assert rig.copier.num_fences == 2  # the cache's making, the wave


class Foreknows:
    """A ForeseesPrompts that knows the routing. `rig`: whose prompt it is."""

    def __init__(self, rig: Rig, routing: Routing) -> None:
        self._rig, self._routing = rig, routing
        self.decided_at: list[int] = []
        """Waves that were submitted before each layer's decision was heard."""
        self.asked: list[int] = []

    def decided(self, layer: int, tokens_per_expert: np.ndarray) -> None:
        assert tokens_per_expert.sum() == TOP_K * len(self._routing[layer])
        self.decided_at.append(self._rig.experts.num_waves)

    def forecast(self, layer: int) -> Forecast | None:
        self.asked.append(layer)
        layers = range(layer + 1, len(self._routing))
        if not layers:
            return None
        counts = np.stack([np.bincount(self._routing[each], minlength=NUM_EXPERTS) for each in layers])
        shares = (counts / counts.sum(axis=1, keepdims=True)).astype(np.float32)
        return Forecast(shares[None], tuple(layers), layers[0])

    def stats(self) -> PredictionStats:
        return PredictionStats(len(self.asked), 0.0)


def test_what_is_foreseen_is_fetched_and_nothing_else() -> None:
    """Popularity would say of each later layer what the prompt before used, which this one does not."""
    routing = [[0, 1, 2] * 3, [3, 4, 5] * 3, [0, 2, 4] * 3]
    rig = Rig(3 * NUM_EXPERTS, 3)
    rig.orchestrator._popularity.counts[1:] = [[9, 9, 9, 0, 0, 0], [0, 9, 0, 9, 0, 9]]
    foreknows = rig.orchestrator._foresees = Foreknows(rig, routing)
    rig.run(routing)
    stats = rig.cache.stats()
    assert (stats.misses, stats.prefetches, stats.loads) == (3, 6, 9)
    assert foreknows.asked == [0, 1]  # after the last layer there is nothing to come
    assert foreknows.decided_at[0] == 0  # ahead of the waves that wait for copies
    assert rig.orchestrator.prediction_stats().layers == 2


def test_nobody_waits_for_a_forecast_where_all_is_there() -> None:
    routing = [[*range(NUM_EXPERTS)]] * 3
    rig = Rig(3 * NUM_EXPERTS, 3)
    rig.run(routing)
    foreknows = rig.orchestrator._foresees = Foreknows(rig, routing)
    rig.run(routing)
    assert foreknows.asked == []
    assert len(foreknows.decided_at) == 3
