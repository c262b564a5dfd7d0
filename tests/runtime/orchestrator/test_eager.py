"""The eager orchestrator against transformers' own experts loop, bit for bit, at any number of slots."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import pytest
import torch

from hetero_gpu import Copier, HostCopier, SlabCache
from hetero_runtime.hf.hooks import expert_mlp
from hetero_runtime.orchestrator import Phase
from hetero_runtime.orchestrator.ahead import Ahead
from hetero_runtime.orchestrator.eager import EagerOrchestrator
from hetero_runtime.orchestrator.prompt_ahead import PromptAhead
from hetero_scheduler import ExpertKey, Lookup, Popularity
from tests.gpu.fake_copier import FailingCopier, FakeCopier
from tests.runtime.orchestrator.rig import HIDDEN, NUM_EXPERTS, TOP_K, CacheRig, given_up_at


class Everything(Ahead):
    """Fetches all that it is given slots for."""

    def __init__(self, cache: SlabCache) -> None:
        self.cache = cache
        self.seen = 0, list[ExpertKey]()

    def layer_begins(self, chosen: np.ndarray) -> None:
        """Whatever it is."""

    def look_ahead(self, layer: int, running: list[ExpertKey]) -> None:
        self.seen = layer, running
        for expert in range(NUM_EXPERTS):
            key = ExpertKey((layer + 1) % 2, expert)
            if self.cache.num_available(key.layer) > 1 and self.cache.lookup(key) is Lookup.MISS:
                self.cache.prefetch(key, protected=running)

    def expert_ran(self) -> None:
        self.look_ahead(*self.seen)

    def layer_ends(self, layer: int, running: list[ExpertKey]) -> None:
        self.look_ahead(layer, running)


class Rig(CacheRig):
    """An eager orchestrator with `num_slots`."""

    def __init__(
        self, num_slots: int, copier: Copier, *, dtype: torch.dtype = torch.float32, is_eager: bool = False
    ) -> None:
        """`is_eager`: prefetches as much of the next layer as it can, whenever it is asked."""
        super().__init__(num_slots, copier, dtype=dtype)
        self.orchestrator = EagerOrchestrator(
            self.cache,
            mlps=[expert_mlp(module) for module in self.experts],
            materialize=self.layout.view,
            eviction=self.eviction,
            prompts=PromptAhead(self.cache, Popularity(self.num_layers, NUM_EXPERTS), top_k=TOP_K),
            ahead=Everything(self.cache) if is_eager else None,
        )

    def run(self, layer: int, experts: Iterable[int]) -> None:
        """`layer` with one token an expert."""
        index = torch.tensor(list(experts))[:, None]
        self.orchestrator.run_layer(layer, torch.randn(len(index), HIDDEN), index, torch.ones(len(index), 1))

    @torch.no_grad()
    def pass_through_all_layers(self, checkpoint: Callable[[], None]) -> None:
        """A prefill that touches every expert of every layer."""
        with self.orchestrator.pass_(Phase.PREFILL, checkpoint=checkpoint):
            for layer in range(self.num_layers):
                self.run(layer, range(NUM_EXPERTS))

    @torch.no_grad()
    def compare(self, num_tokens: int, *, seed: int, phase: Phase) -> None:
        """One pass through all layers: equal to transformers' loop in every bit."""
        torch.manual_seed(seed)
        with self.orchestrator.pass_(phase, checkpoint=lambda: None):
            for layer, module in enumerate(self.experts):
                hidden = torch.randn(num_tokens, HIDDEN).to(module.gate_up_proj.dtype)
                weights, index = torch.rand(num_tokens, NUM_EXPERTS).topk(TOP_K)
                expected = module(hidden, index, weights)
                assert torch.equal(self.orchestrator.run_layer(layer, hidden, index, weights), expected)
        self.orchestrator.check()


COPIERS: list[Callable[[], Copier]] = [HostCopier, FakeCopier]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("copier", COPIERS, ids=["host", "late copies"])
@pytest.mark.parametrize("num_slots", [1, 2, 3, 7, 12, 16])
def test_output_is_transformers_own_in_every_bit(
    num_slots: int, copier: Callable[[], Copier], dtype: torch.dtype
) -> None:
    rig = Rig(num_slots, copier(), dtype=dtype)
    rig.compare(23, seed=1, phase=Phase.PREFILL)
    for step in range(6):
        rig.compare(1, seed=2 + step, phase=Phase.DECODE)
    rig.compare(5, seed=9, phase=Phase.PREFILL)


@pytest.mark.parametrize("copier", COPIERS, ids=["host", "late copies"])
@pytest.mark.parametrize("num_slots", [3, 7, 12, 16])
def test_prefetches_after_every_expert_drive_out_none_that_is_to_be_given_back(
    num_slots: int, copier: Callable[[], Copier]
) -> None:
    rig = Rig(num_slots, copier(), is_eager=True)
    for step in range(6):
        rig.compare(5 if step % 2 else 1, seed=step, phase=Phase.PREFILL if step % 2 else Phase.DECODE)
    assert rig.cache.stats().prefetches > 0


def test_waves_load_each_expert_once_and_keep_residents_that_come_first() -> None:
    rig = Rig(2, HostCopier())
    rig.orchestrator.prompts = None
    with torch.no_grad(), rig.orchestrator.pass_(Phase.PREFILL, checkpoint=lambda: None):
        for _ in range(2):
            rig.run(0, range(NUM_EXPERTS))
    # the second pass finds experts 6 and 7; one slot goes through 0 to 5, and 7 gives way before 6 does
    assert rig.cache.stats().hits == 2
    assert rig.cache.stats().loads == 8 + 7


@pytest.mark.parametrize(("phase", "num_prefetches"), [(Phase.PREFILL, 1), (Phase.DECODE, 0)])
def test_prefill_fetches_popular_experts_ahead_and_decode_does_not(phase: Phase, num_prefetches: int) -> None:
    rig = Rig(10, FakeCopier())
    with torch.no_grad(), rig.orchestrator.pass_(Phase.DECODE, checkpoint=lambda: None):
        rig.run(1, [7] * 3)  # the most popular expert of layer 1
        rig.run(0, range(8))
        rig.run(1, [0, 1, 2])  # and now it is gone
    with torch.no_grad(), rig.orchestrator.pass_(phase, checkpoint=lambda: None):
        rig.run(0, [5])
        assert rig.cache.stats().prefetches == num_prefetches
        rig.run(1, [7])
    stats = rig.cache.stats()
    assert (stats.late, stats.misses) == (num_prefetches, 12 + (1 - num_prefetches))
    rig.orchestrator.check()


@pytest.mark.parametrize("at", [0, 1])
def test_a_pass_given_up_between_layers_leaves_the_cache_whole(at: int) -> None:
    rig = Rig(3, FakeCopier())
    with pytest.raises(RuntimeError, match="no longer wanted"):
        rig.pass_through_all_layers(given_up_at(at))
    rig.orchestrator.check()
    rig.compare(9, seed=3, phase=Phase.PREFILL)


@pytest.mark.parametrize("num_good_loads", [0, 1, 4])
def test_a_failing_copy_in_the_middle_of_a_layer_leaves_the_cache_whole(num_good_loads: int) -> None:
    copier = FailingCopier(num_good_loads)
    rig = Rig(3, copier)
    with pytest.raises(OSError, match="the link is down"):
        rig.pass_through_all_layers(lambda: None)
    rig.orchestrator.check()
    copier.num_good = 10**9
    rig.compare(9, seed=3, phase=Phase.PREFILL)
