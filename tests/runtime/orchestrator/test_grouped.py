"""The grouped orchestrator: transformers' result at any number of slots, and no load too many.

On a CPU, with the kernels in Triton's interpreter and copies that arrive when they are waited for; on a GPU,
with copies on a stream of their own into slabs that earlier waves are still reading.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import torch

from hetero_gpu import Copier, HostCopier
from hetero_gpu.experts.prefill import GroupedExperts
from hetero_runtime.experts.formats import PLAIN
from hetero_runtime.experts.kernel_format import expert_format
from hetero_runtime.orchestrator import Phase
from hetero_runtime.orchestrator.grouped import GroupedOrchestrator
from hetero_scheduler import ExpertKey, Popularity
from tests.gpu.experts.cases import DEVICE, IS_INTERPRETED, WHERE, assert_close
from tests.gpu.fake_copier import FailingCopier, FakeCopier
from tests.runtime.orchestrator.rig import HIDDEN, NUM_EXPERTS, TOP_K, CacheRig, Sizes, given_up_at

pytestmark = WHERE


def make_copier() -> Copier:
    """One whose copies come late."""
    if IS_INTERPRETED:
        return FakeCopier()
    from hetero_gpu.cuda_transfer import CudaCopier

    return CudaCopier(DEVICE)


class Rig(CacheRig):
    """A grouped orchestrator with `num_slots`; `max_tokens` run through a layer at once."""

    def __init__(
        self,
        num_slots: int,
        copier: Copier,
        *,
        num_layers: int = 3,
        layer_slots: list[int] | None = None,
        sizes: Sizes = Sizes(),  # noqa: B008 (a tuple)
        max_tokens: int = 64,
        is_fetching_ahead: bool = True,
    ) -> None:
        super().__init__(
            num_slots,
            copier,
            num_layers=num_layers,
            layer_slots=layer_slots,
            sizes=sizes,
            device=DEVICE.type,
        )
        form = expert_format(self.layout, {"gate_up_proj": PLAIN, "down_proj": PLAIN}, self.experts[0])
        self.orchestrator = GroupedOrchestrator(
            self.cache,
            slabs=self.slabs,
            experts=GroupedExperts(
                form, sizes.top_k, max_tokens=max_tokens, dtype=torch.float32, device=DEVICE
            ),
            eviction=self.eviction,
            popularity=Popularity(num_layers, sizes.num_experts),
            is_fetching_ahead=is_fetching_ahead,
        )

    @torch.no_grad()
    def run(
        self, experts_of_layers: Iterable[list[int]], checkpoint: Callable[[], None] = lambda: None
    ) -> None:
        """One prompt whose tokens use `experts_of_layers[l]` in layer l, one each (and twice the same)."""
        with self.orchestrator.pass_(Phase.PREFILL, checkpoint=checkpoint):
            for layer, experts in enumerate(experts_of_layers):
                index = torch.tensor(experts, device=DEVICE).repeat_interleave(TOP_K).view(-1, TOP_K)
                self.orchestrator.run_layer(
                    layer, torch.randn(len(index), HIDDEN, device=DEVICE), index, torch.ones_like(index) / 2
                )
        self.orchestrator.check()

    @torch.no_grad()
    def compare(self, num_tokens: int, *, seed: int) -> None:
        """One prompt, equal to transformers' loop up to rounding."""
        torch.manual_seed(seed)
        outputs = []
        with self.orchestrator.pass_(Phase.PREFILL, checkpoint=lambda: None):
            for layer, module in enumerate(self.experts):
                hidden = torch.randn(num_tokens, self.sizes.hidden)
                weights, index = torch.rand(num_tokens, self.sizes.num_experts).topk(self.sizes.top_k)
                expected = module(hidden, index, weights)
                inputs = (tensor.to(DEVICE) for tensor in (hidden, index, weights))
                outputs.append((expected, self.orchestrator.run_layer(layer, *inputs)))
        for layer, (expected, out) in enumerate(outputs):
            assert_close(f"layer {layer}", expected, out.cpu(), 1e-5)
        self.orchestrator.check()


EVERY = [list(range(NUM_EXPERTS))] * 3


@pytest.mark.parametrize("num_tokens", [1, 23], ids=lambda n: f"T{n}")
@pytest.mark.parametrize("num_slots", [1, 3, 12, 24])
def test_output_is_transformers_own(num_slots: int, num_tokens: int) -> None:
    rig = Rig(num_slots, make_copier())
    for seed in range(2):
        rig.compare(num_tokens, seed=seed)


@pytest.mark.gpu
@pytest.mark.parametrize("num_slots", [3, 40, 150])
def test_slabs_that_are_loaded_again_while_waves_run(num_slots: int) -> None:
    """Copies and waves of some 100 us each, through every slab again and again."""
    rig = Rig(num_slots, make_copier(), sizes=Sizes(64, 4, 1024, 512), max_tokens=700)
    for seed in range(4):
        rig.compare(1000, seed=seed)


@pytest.mark.parametrize("layer_slots", [[1, 1, 1], [2, 3, 8]], ids=str)
def test_a_pool_for_each_layer(layer_slots: list[int]) -> None:
    rig = Rig(sum(layer_slots), make_copier(), layer_slots=layer_slots)
    for seed in range(2):
        rig.compare(23, seed=seed)


@pytest.mark.parametrize("num_slots", [1, 5])
def test_a_prompt_longer_than_the_workspace_runs_in_chunks(num_slots: int) -> None:
    rig = Rig(num_slots, make_copier(), max_tokens=7)
    rig.compare(23, seed=1)
    rig.compare(23, seed=2)


def test_a_pinned_prefix_is_never_given_away() -> None:
    rig = Rig(NUM_EXPERTS + 2, make_copier())
    for expert in range(NUM_EXPERTS):
        rig.cache.pin(ExpertKey(0, expert))
    rig.compare(23, seed=1)
    assert len(rig.cache.residents(0)) == NUM_EXPERTS


@pytest.mark.parametrize("is_fetching_ahead", [True, False])
def test_a_pass_loads_what_it_uses_less_what_was_resident(is_fetching_ahead: bool) -> None:
    """Every layer starts with three of its experts: recency alone would lose all of them."""
    rig = Rig(9, HostCopier(), is_fetching_ahead=is_fetching_ahead)
    for layer in range(3):
        for expert in (1, 4, 6):
            rig.cache.load(ExpertKey(layer, expert))
        rig.cache.begin_layer(layer, ())
    before = rig.cache.stats()
    rig.run(EVERY)
    assert (rig.cache.stats() - before).loads == 3 * (NUM_EXPERTS - 3)


def test_layers_to_come_are_sacrificed_only_as_far_as_copies_and_waves_need_it() -> None:
    """All slots hold the last layer; the first two need one slot that is nobody's, and take one."""
    rig = Rig(NUM_EXPERTS, HostCopier())
    for expert in range(NUM_EXPERTS):
        rig.cache.load(ExpertKey(2, expert))
    rig.cache.begin_layer(2, ())
    before = rig.cache.stats()
    rig.run(EVERY)
    assert (rig.cache.stats() - before).loads == 2 * NUM_EXPERTS + 1


def test_a_prompt_that_touches_few_experts_prefetches_no_more_than_it_uses() -> None:
    rig = Rig(24, FakeCopier())
    rig.run([[0, 1], [2, 3], [4, 5]])
    stats = rig.cache.stats()
    assert stats.prefetches == 0  # nothing is known, and two of eight experts are no likely guess
    assert stats.loads == 6


def test_popular_experts_of_the_next_layers_are_on_their_way_before_they_are_asked_for() -> None:
    rig = Rig(24, FakeCopier())
    popular = [[0, 1, 2] * 6, [3, 4, 5] * 6, [5, 6, 7] * 6]
    rig.run(popular)
    for layer in range(3):
        for expert in rig.cache.residents(layer).tolist():
            rig.cache._machine.evict(ExpertKey(layer, expert))
    before = rig.cache.stats()
    rig.run(popular)
    stats = rig.cache.stats() - before
    assert (stats.prefetches, stats.late, stats.misses) == (6, 6, 3)
    assert stats.prefetches_dropped == 0


def test_a_wave_frees_its_slots_for_loads_that_start_when_it_was_read() -> None:
    copier = FakeCopier()
    rig = Rig(2, copier, num_layers=1, is_fetching_ahead=False)
    rig.run([list(range(NUM_EXPERTS))])
    first = copier.starts_after[:2]
    assert len(set(first)) == 1  # the fence of the cache's making
    fences = [fence for fence in copier.starts_after[2:] if isinstance(fence, int)]
    assert len(fences) == NUM_EXPERTS - 2
    assert fences == sorted(fences) and fences[0] > 1


def test_the_policy_sees_the_prompt_and_is_not_touched_otherwise() -> None:
    rig = Rig(5, HostCopier())
    rig.run([[0, 1], [2, 3], [4, 5]])
    used = [(key.layer, key.expert) for key in rig.all_keys() if rig.eviction.score[key] > 0]
    assert used == [(0, 0), (0, 1), (1, 2), (1, 3), (2, 4), (2, 5)]
    assert rig.eviction.passes.tolist() == [1, 1, 1]


@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_pass_given_up_between_layers_leaves_the_cache_whole(at: int) -> None:
    rig = Rig(4, make_copier())
    with pytest.raises(RuntimeError, match="no longer wanted"):
        rig.run(EVERY, given_up_at(at))
    rig.orchestrator.check()
    assert rig.cache.counts().fetch == 0
    rig.compare(9, seed=3)


@pytest.mark.skipif(not IS_INTERPRETED, reason="real copies do not fail when told to")
@pytest.mark.parametrize("num_good_loads", [0, 1, 4, 11])
def test_a_failing_copy_leaves_the_cache_whole(num_good_loads: int) -> None:
    copier = FailingCopier(num_good_loads)
    rig = Rig(4, copier)
    with pytest.raises(OSError, match="the link is down"):
        rig.run(EVERY)
    rig.orchestrator.check()
    assert rig.cache.counts().fetch == rig.cache.counts().compute == 0
    copier.num_good = 10**9
    rig.compare(9, seed=3)
