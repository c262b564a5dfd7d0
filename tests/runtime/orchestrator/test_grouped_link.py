"""The grouped orchestrator on a device with a clock of its own: how long the link rests in a prompt."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import pytest
import torch

from hetero_gpu import Copier, Fence, SlabCache, SlabPool, Transfer
from hetero_gpu.experts.prefill import GroupedExperts
from hetero_runtime.orchestrator import Phase
from hetero_runtime.orchestrator.ahead import PredictionStats
from hetero_runtime.orchestrator.grouped import GroupedOrchestrator
from hetero_scheduler import Popularity, SlotMachine, make_eviction
from hetero_scheduler.predict import Forecast

NUM_LAYERS, NUM_EXPERTS, TOP_K, NUM_TOKENS = 6, 64, 4, 400
COPY_S, EXPERT_S, ATTENTION_S = 1.0, 0.05, 4.0
"""The link is slower than the experts; between two layers there is time for four copies."""


@dataclass
class Device(Copier[torch.Tensor]):
    """Streams as the moments when they have done what they were given. The host takes no time."""

    host_s: float = 0.0
    compute_s: float = 0.0
    link_s: float = 0.0
    copies: list[tuple[float, float]] = field(default_factory=list)
    """Begin and end of each."""

    def compute(self, seconds: float) -> None:
        self.compute_s = max(self.compute_s, self.host_s) + seconds

    def submit(self, source: torch.Tensor, slab: torch.Tensor, *, after: Fence | None) -> Transfer:
        begin = max(self.link_s, self.host_s, cast(float, after or 0.0))
        self.link_s = begin + COPY_S
        self.copies.append((begin, self.link_s))
        return _Copied(self, self.link_s)

    def fence(self) -> Fence | None:
        return cast(Fence, max(self.compute_s, self.host_s))

    def stall_s(self) -> float:
        return 0.0

    def synchronize(self) -> None:
        self.host_s = max(self.host_s, self.link_s)

    def rested_s(self) -> float:
        """Of the link, between its first copy and its last."""
        return self.copies[-1][1] - self.copies[0][0] - COPY_S * len(self.copies)


class _Copied(Transfer):
    def __init__(self, device: Device, done_s: float) -> None:
        self._device, self._done_s = device, done_s

    def is_done(self) -> bool:
        return self._done_s <= self._device.host_s

    def wait(self) -> None:
        self._device.compute_s = max(self._device.compute_s, self._done_s)


class TimedExperts:
    """In place of kernels. The host is told the counts once the device is there."""

    max_tokens, top_k = NUM_TOKENS, TOP_K

    def __init__(self, device: Device) -> None:
        self._device = device
        self.bounds = torch.zeros(0)

    def begin(self, hidden: Any, experts: torch.Tensor, weights: Any, *, num_experts: int) -> None:
        tokens = torch.bincount(experts.flatten(), minlength=num_experts)
        self.bounds = torch.nn.functional.pad(tokens.cumsum(0), (1, 0)).int()
        self._device.compute(0.0)
        self._device.host_s = self._device.compute_s

    def add(self, slabs: torch.Tensor, experts: torch.Tensor, slots: torch.Tensor) -> None:
        self._device.compute(EXPERT_S * len(experts))

    def finish(self, out: torch.Tensor) -> None: ...


class Foresees:
    """Knows the shares of all layers to come."""

    def __init__(self, shares: np.ndarray) -> None:
        self._shares = shares

    def decided(self, layer: int, tokens_per_expert: Any) -> None: ...

    def forecast(self, layer: int) -> Forecast | None:
        layers = tuple(range(layer + 1, NUM_LAYERS))
        return Forecast(self._shares[None, layer + 1 :].astype(np.float32), layers, 0) if layers else None

    def stats(self) -> PredictionStats:
        return PredictionStats()


def run(device: Device, shares: np.ndarray, num_slots: int, *, is_foreseen: bool) -> None:
    """Two prompts of the same kind, one after another; of the second one the device keeps the times."""
    eviction = make_eviction("lru", num_layers=NUM_LAYERS, num_experts=NUM_EXPERTS)
    slabs, record = SlabPool(num_slots, 16, torch.device("cpu")), torch.zeros(16, dtype=torch.uint8)
    machine = SlotMachine(num_slots, num_layers=NUM_LAYERS, num_experts=NUM_EXPERTS)
    orchestrator = GroupedOrchestrator(
        SlabCache(slabs=slabs, machine=machine, eviction=eviction, copier=device, record=lambda _key: record),
        slabs=slabs,
        experts=cast(GroupedExperts, TimedExperts(device)),
        eviction=eviction,
        popularity=Popularity(NUM_LAYERS, NUM_EXPERTS),
        is_fetching_ahead=True,
        foresees=Foresees(shares) if is_foreseen else None,
    )
    rng = np.random.default_rng(0)
    for _ in range(2):
        device.synchronize()
        device.copies.clear()
        with orchestrator.pass_(Phase.PREFILL, checkpoint=lambda: None):
            orchestrator.expect_prompt(NUM_TOKENS)
            for layer in range(NUM_LAYERS):
                device.compute(ATTENTION_S)
                index = torch.from_numpy(rng.choice(NUM_EXPERTS, size=(NUM_TOKENS, TOP_K), p=shares[layer]))
                hidden = torch.zeros(NUM_TOKENS, 4)
                orchestrator.run_layer(layer, hidden, index, torch.ones_like(index))
        orchestrator.check()


@pytest.mark.parametrize("is_foreseen", [True, False], ids=["foreseen", "popular"])
@pytest.mark.parametrize("num_slots", [60, 100, 170], ids=lambda n: f"{n} of {NUM_LAYERS * NUM_EXPERTS}")
def test_the_link_hardly_rests_from_its_first_copy_to_its_last(num_slots: int, is_foreseen: bool) -> None:
    """More is asked for than it carries in the time that computation alone would take."""
    device = Device()
    shares = np.random.default_rng(1).dirichlet(np.full(NUM_EXPERTS, 0.5), size=NUM_LAYERS)
    run(device, shares, num_slots, is_foreseen=is_foreseen)
    assert len(device.copies) > 20
    assert device.rested_s() < 0.1 * COPY_S * len(device.copies)
