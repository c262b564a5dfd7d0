"""Lookahead in the device's steps, without a GPU: it asks for what the host's schedule asks for."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hetero_gpu.control import ControlRegion
from hetero_gpu.predict.lookahead import DeviceLookahead
from hetero_gpu.tables import DeviceTables, ensure
from hetero_runtime.orchestrator import captured_lookahead
from hetero_runtime.orchestrator.captured_lookahead import CapturedLookahead
from hetero_runtime.plan.captured import MOST_OUTSTANDING
from hetero_scheduler import ExpertKey, SlotState, make_eviction
from hetero_scheduler.eviction.lookahead import Lookahead
from hetero_scheduler.predict.lookahead_mlp import LookaheadMlp
from hetero_scheduler.prefetch import make_schedule
from hetero_scheduler.prefetch.steering import Steering
from tests.runtime.foresight.predictors import random_lookahead

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the interpreter stands in where there is no GPU"
)

NUM_LAYERS, NUM_EXPERTS, TOP_K, HIDDEN, NUM_SLOTS = 8, 16, 2, 6, 16
CPU = torch.device("cpu")


class Device:
    """One row, with a predictor that has learnt nothing and somebody who asks; nobody carries anything."""

    def __init__(self, per_layer: int) -> None:
        weights, shape = random_lookahead(
            NUM_LAYERS, NUM_EXPERTS, hidden_size=HIDDEN, visual_size=0, top_k=TOP_K
        )
        self.host = LookaheadMlp(weights, shape)
        self.tables = DeviceTables(
            num_slots=NUM_SLOTS, num_layers=NUM_LAYERS, num_experts=NUM_EXPERTS, max_pairs=TOP_K, device=CPU
        )
        self.tables.pools[:, 1] = NUM_SLOTS
        region = ControlRegion(CPU, ring_size=MOST_OUTSTANDING)
        self.tables.attach(region)
        eviction = make_eviction("lookahead", num_layers=NUM_LAYERS, num_experts=NUM_EXPERTS)
        assert isinstance(eviction, Lookahead)
        self.asker = CapturedLookahead(
            DeviceLookahead(weights, shape, active=torch.ones(1, dtype=torch.bool)),
            tables=self.tables,
            region=region,
            per_layer=per_layer,
            kept_back=TOP_K,
            eviction=eviction,
        )
        self.asker.begin_decode()

    def run(self, layer: int, chosen: torch.Tensor, hidden: torch.Tensor) -> None:
        self.asker.begin_layer(layer, chosen)
        ensure(self.tables, layer, chosen)
        self.asker.ask(layer, hidden)
        self.host.observe_tokens(0, layer, chosen.numpy(), hidden[0])

    def fetching(self) -> list[ExpertKey]:
        """In the order in which they were asked for."""
        slots = np.flatnonzero(self.tables.slot_state.numpy() == SlotState.FETCH)
        slots = slots[np.argsort(self.tables.slot_tag.numpy()[slots])]
        keys = self.tables.slot_key.numpy()[slots]
        return [ExpertKey(*divmod(int(key), NUM_EXPERTS)) for key in keys]


def wanted_by_the_host(
    device: Device, layer: int, per_layer: int, present: set[ExpertKey]
) -> list[ExpertKey]:
    steering = Steering(
        make_schedule("top_b", num_layers=NUM_LAYERS, looks_at_next=True),
        make_eviction("lru", num_layers=NUM_LAYERS, num_experts=NUM_EXPERTS),
        num_layers=NUM_LAYERS,
        per_layer=per_layer,
        is_shared=True,
    )
    forecast = device.host.forecast()
    assert forecast is not None
    steering.take(forecast)
    is_present = np.zeros((NUM_LAYERS, NUM_EXPERTS), dtype=np.bool_)
    is_present[tuple(np.array(sorted(present)).T)] = True
    found = []
    while len(found) < MOST_OUTSTANDING:
        task = steering.next(layer, is_present=is_present, has_slots=lambda _layer: True)
        assert task is not None
        found.append(task.key)
        is_present[task.key] = True
    return found


@pytest.mark.parametrize("per_layer", [1, 3, NUM_EXPERTS])
def test_it_asks_for_what_the_host_would_fetch_first(per_layer: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captured_lookahead, "LIKELY", 0.0)  # the host's link decides what is worth it
    device, chosen = Device(per_layer), torch.tensor([[3, 5]])
    hidden = torch.randn(1, HIDDEN, generator=torch.Generator().manual_seed(per_layer))
    device.run(0, chosen, hidden)
    resident = {ExpertKey(0, expert) for expert in chosen[0].tolist()}
    assert device.fetching() == wanted_by_the_host(device, 0, per_layer, resident)


def test_what_is_probably_not_used_is_worth_no_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    device, chosen = Device(NUM_EXPERTS), torch.tensor([[3, 5]])
    monkeypatch.setattr(captured_lookahead, "LIKELY", 1.1)
    device.run(0, chosen, torch.ones(1, HIDDEN))
    assert device.fetching() == []
    said = torch.zeros(5, NUM_EXPERTS)
    said[0, 2], said[1, 4], said[4, 7] = 0.9 / TOP_K, 0.4 / TOP_K, 0.6 / TOP_K
    monkeypatch.setattr(captured_lookahead, "LIKELY", 0.5)
    keys = device.asker._wanted(0, said).tolist()
    assert keys[:3] == [NUM_EXPERTS + 2, -1, 5 * NUM_EXPERTS + 7]
    assert set(keys[3:]) == {-1}


def test_the_ring_is_full_and_nothing_more_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captured_lookahead, "LIKELY", 0.0)
    device = Device(3)
    for layer in range(NUM_LAYERS):  # the last one looks at nothing
        device.run(layer, torch.tensor([[layer, layer + 1]]), torch.ones(1, HIDDEN))
        assert len(device.fetching()) <= MOST_OUTSTANDING
    device.tables.check()
    device.asker.end_decode()
    assert torch.isfinite(device.tables.score).all()
