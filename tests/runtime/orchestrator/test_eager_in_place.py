"""The eager orchestrator with misses computed in place: sums, slots, scores, failures."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import pytest
import torch

from hetero_gpu import Copier, HostCopier
from hetero_gpu.stopwatch import HostStopwatch
from hetero_runtime.hf.hooks import expert_mlp
from hetero_runtime.in_place import InPlaceMisses
from hetero_runtime.orchestrator import Phase
from hetero_runtime.orchestrator.eager import EagerOrchestrator
from hetero_scheduler.misses import (
    AllInPlace,
    ByCost,
    CostCurve,
    Costs,
    DeviceSide,
    FixedShare,
    MissPolicy,
)
from tests.gpu.fake_copier import FailingCopier, FakeCopier
from tests.runtime.in_place.by_hand import ExpertsByHand
from tests.runtime.orchestrator.rig import HIDDEN, NUM_EXPERTS, TOP_K, CacheRig, given_up_at


def by_cost() -> ByCost:
    """Loading an expert takes what two take on the CPU."""
    device = DeviceSide(load_s=2.0, compute=CostCurve({1: 0.001}), overlaps=True)
    return ByCost(Costs(CostCurve({1: 1.0}), device, call_s=1e-9), on_lost=lambda verdict: None)


POLICIES: dict[str, Callable[[], MissPolicy]] = {
    "all": AllInPlace,
    "half": lambda: FixedShare(0.5),
    "by cost": by_cost,
}


class Rig(CacheRig):
    """An eager orchestrator with `num_slots`, whose misses `policy` divides."""

    def __init__(
        self, num_slots: int, copier: Copier, policy: MissPolicy, *, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__(num_slots, copier, dtype=dtype)
        self.by_hand = ExpertsByHand(self.experts)
        self.policy = policy
        self.misses = InPlaceMisses(
            self.by_hand, policy, cache=self.cache, eviction=self.eviction, stopwatch=HostStopwatch()
        )
        self.orchestrator = EagerOrchestrator(
            self.cache,
            mlps=[expert_mlp(module) for module in self.experts],
            materialize=self.layout.view,
            eviction=self.eviction,
            prompts=None,
            in_place=self.misses,
        )

    @torch.no_grad()
    def run(self, layer: int, experts: Iterable[int], phase: Phase = Phase.DECODE) -> None:
        """A pass of `layer` with one token an expert."""
        index = torch.tensor(list(experts))[:, None]
        with self.orchestrator.pass_(phase, checkpoint=lambda: None):
            self.orchestrator.run_layer(
                layer, torch.randn(len(index), HIDDEN), index, torch.ones(len(index), 1)
            )

    @torch.no_grad()
    def compare(
        self, num_tokens: int, *, seed: int, phase: Phase, checkpoint: Callable[[], None] = lambda: None
    ) -> None:
        """One pass through all layers: transformers' loop, up to rounding."""
        torch.manual_seed(seed)
        tolerance = 1e-5 if self.experts[0].gate_up_proj.dtype == torch.float32 else 2e-2
        with self.orchestrator.pass_(phase, checkpoint=checkpoint):
            for layer, module in enumerate(self.experts):
                hidden = torch.randn(num_tokens, HIDDEN).to(module.gate_up_proj.dtype)
                weights, index = torch.rand(num_tokens, NUM_EXPERTS).topk(TOP_K)
                ours = self.orchestrator.run_layer(layer, hidden, index, weights)
                expected = module(hidden, index, weights)
                assert ours.dtype == expected.dtype
                difference = (ours - expected).float().norm() / expected.float().norm()
                assert difference < tolerance, f"{difference:.1e}"
        self.orchestrator.check()
        assert self.by_hand.is_at_rest


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("copier", [HostCopier, FakeCopier], ids=["host", "late copies"])
@pytest.mark.parametrize(
    ("name", "num_slots"), [("all", 0), *((name, n) for name in POLICIES for n in (1, 3, 7, 16))]
)
def test_output_is_transformers_own_up_to_rounding(
    name: str, num_slots: int, copier: Callable[[], Copier], dtype: torch.dtype
) -> None:
    rig = Rig(num_slots, copier(), POLICIES[name](), dtype=dtype)
    rig.compare(23, seed=1, phase=Phase.PREFILL)
    for step in range(6):
        rig.compare(1, seed=2 + step, phase=Phase.DECODE)
    rig.compare(5, seed=9, phase=Phase.PREFILL)
    assert (len(rig.by_hand.asked) > 0) == (num_slots < 16)


@pytest.mark.parametrize("name", POLICIES)
def test_what_is_computed_in_place_takes_no_slot_and_every_miss_is_one_or_the_other(name: str) -> None:
    rig = Rig(4, HostCopier(), POLICIES[name]())
    for seed in range(12):
        rig.compare(1 + seed % 3, seed=seed, phase=Phase.DECODE)
    cache, in_place = rig.cache.stats(), rig.orchestrator.in_place_stats()
    assert in_place.experts == sum(map(len, rig.by_hand.asked)) > 0
    assert in_place.seconds == len(rig.by_hand.asked)
    assert cache.misses == cache.loads + in_place.experts
    assert cache.required == cache.hits + cache.late + cache.misses
    if name == "all":
        assert (cache.loads, cache.evictions) == (4, 0)
    else:
        assert cache.evictions > 0


def test_the_eviction_policy_sees_the_same_whoever_computes() -> None:
    rigs = [Rig(5, HostCopier(), make()) for make in POLICIES.values()]
    for rig in rigs:
        for seed in range(6):
            rig.compare(2, seed=seed, phase=Phase.DECODE)
    assert all(np.array_equal(rig.eviction.score, rigs[0].eviction.score) for rig in rigs)


@pytest.mark.parametrize(
    ("used_before", "in_place"),
    [([], [3, 5]), ([[5, 3], [0, 1]], [2, 4]), ([[3, 2], [5, 4], [0, 1]], [2, 3])],
    ids=["weights alone", "used before or not", "the older use"],
)
def test_the_worthiest_misses_are_loaded(used_before: list[list[int]], in_place: list[int]) -> None:
    """To LRU all four are used now, so their last use before this decides, then the router's weights."""
    rig = Rig(2, HostCopier(), FixedShare(0.0))
    for experts in used_before or [[0, 1]]:
        rig.run(0, experts)
    rig.misses.policy = FixedShare(0.5)
    index, weights = torch.tensor([[2, 3, 4, 5]]), torch.tensor([[0.4, 0.1, 0.3, 0.2]])
    with torch.no_grad(), rig.orchestrator.pass_(Phase.DECODE, checkpoint=lambda: None):
        rig.orchestrator.run_layer(0, torch.randn(1, HIDDEN), index, weights)
    assert rig.by_hand.asked == [in_place]
    assert rig.cache.residents(0).tolist() == sorted({2, 3, 4, 5} - set(in_place))


@pytest.mark.parametrize("phase", [Phase.DECODE, Phase.PREFILL])
def test_a_failure_on_the_cpu_ends_the_pass_and_the_next_one_is_served(phase: Phase) -> None:
    rig = Rig(3, FakeCopier(), FixedShare(0.5))
    rig.compare(4, seed=1, phase=phase)
    rig.by_hand.fail_next = RuntimeError("a worker died")
    with pytest.raises(RuntimeError, match="a worker died"):
        rig.compare(9, seed=2, phase=phase)
    rig.orchestrator.check()
    assert rig.by_hand.is_at_rest
    rig.compare(9, seed=3, phase=phase)


def test_a_failing_copy_is_raised_and_the_cpu_is_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    copier = FailingCopier(3)
    rig = Rig(3, copier, FixedShare(0.5))
    rig.run(0, [0, 1, 2])
    rig.by_hand.fail_next = RuntimeError("a worker died too")
    with pytest.raises(OSError, match="the link is down"):
        rig.run(0, [3, 4, 5, 6])
    assert rig.by_hand.is_at_rest
    assert "in a pass that was given up: a worker died too" in caplog.text
    rig.orchestrator.check()
    copier.num_good = 10**9
    rig.compare(9, seed=3, phase=Phase.PREFILL)


def test_a_pass_given_up_between_layers_leaves_nothing_under_way() -> None:
    rig = Rig(3, FakeCopier(), by_cost())
    with pytest.raises(RuntimeError, match="no longer wanted"):
        rig.compare(9, seed=1, phase=Phase.PREFILL, checkpoint=given_up_at(1))
    assert rig.by_hand.is_at_rest
    rig.orchestrator.check()
    rig.compare(9, seed=3, phase=Phase.PREFILL)


def test_torch_leaves_the_workers_their_cores_inside_a_pass_only() -> None:
    rig, before = Rig(3, HostCopier(), AllInPlace()), torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        with rig.orchestrator.pass_(Phase.DECODE, checkpoint=lambda: None):
            assert torch.get_num_threads() == 2
        assert torch.get_num_threads() == 3
        rig.by_hand.num_workers = 7
        with rig.orchestrator.pass_(Phase.DECODE, checkpoint=lambda: None):
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


class Listening(FixedShare):
    """Keeps what it is told."""

    def __init__(self) -> None:
        super().__init__(0.5)
        self.in_place: list[tuple[list[int], float]] = []
        self.device: list[tuple[list[int], list[int]]] = []
        self.num_calls = 0

    def observe_in_place(self, tokens: Sequence[int], seconds: float) -> None:
        self.in_place.append((list(tokens), seconds))

    def observe_call(self, seconds: float) -> None:
        assert 0 < seconds < 1
        self.num_calls += 1

    def observe_device(self, hit_tokens: Sequence[int], loaded_tokens: Sequence[int], seconds: float) -> None:
        assert seconds > 0
        self.device.append((list(hit_tokens), list(loaded_tokens)))


def test_the_policy_hears_what_layers_took() -> None:
    policy = Listening()
    rig = Rig(2, HostCopier(), policy)
    rig.run(0, [0, 1])
    index = torch.tensor([[0, 2, 3]])
    with torch.no_grad(), rig.orchestrator.pass_(Phase.DECODE, checkpoint=lambda: None):
        for _ in range(2):
            rig.orchestrator.run_layer(0, torch.randn(1, HIDDEN), index, torch.ones(1, 3))
    assert policy.in_place == [([1], 1.0)] * len(rig.by_hand.asked)
    assert policy.num_calls == len(rig.by_hand.asked)
    assert policy.device == [([1], [1])]  # of the layer before; prompts are not timed


def test_a_policy_that_gave_up_is_asked_no_more() -> None:
    policy = Listening()
    policy.is_lost = True
    rig = Rig(2, HostCopier(), policy)
    rig.run(0, [0, 1, 2, 3])
    assert not rig.by_hand.asked
    assert not policy.device
    rig.orchestrator.check()


def test_closing_ends_the_workers() -> None:
    rig = Rig(2, HostCopier(), AllInPlace())
    rig.orchestrator.close()
    assert rig.by_hand.is_closed
