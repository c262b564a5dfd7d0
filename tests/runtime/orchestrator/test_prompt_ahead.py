"""What a prompt fetches before it is asked, how much of the pool that takes, and who gives way."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hetero_gpu import HostCopier
from hetero_runtime.hf.hooks import expert_mlp
from hetero_runtime.orchestrator import Phase
from hetero_runtime.orchestrator.eager import EagerOrchestrator
from hetero_runtime.orchestrator.prompt_ahead import PromptAhead
from hetero_scheduler import ExpertKey, Lookup, Popularity
from tests.gpu.fake_copier import FakeCopier
from tests.runtime.orchestrator.rig import HIDDEN, NUM_EXPERTS, TOP_K, CacheRig

LAYERS, MANY = 3, 512


def popular(*experts: int) -> Popularity:
    """The same ones in every layer, the first of them most; nobody else is ever used."""
    uses = np.zeros((LAYERS, NUM_EXPERTS))
    uses[:, experts] = np.arange(len(experts), 0, -1)
    return Popularity.profiled(uses, top_k=TOP_K)


def residents(rig: CacheRig) -> list[list[int]]:
    """By layer, those on their way included."""
    return [np.flatnonzero(~rig.cache.absent(layer)).tolist() for layer in range(rig.num_layers)]


def test_a_prompt_that_is_announced_fetches_for_the_nearest_layers_before_any_runs() -> None:
    rig = CacheRig(16, FakeCopier(), num_layers=LAYERS)
    ahead = PromptAhead(rig.cache, popular(6, 2, 4), top_k=TOP_K)
    ahead.begin(2)
    assert residents(rig) == [[2, 4, 6], [2, 4, 6], [2, 6]]  # 16 slots less 8 that are kept back; 6 before 2
    assert rig.cache.counts().fetch == 8
    ahead.end()
    rig.cache.settle()
    rig.cache.check()


def test_what_is_improbable_is_not_fetched() -> None:
    rig = CacheRig(24, FakeCopier(), num_layers=LAYERS)
    short, long = (PromptAhead(rig.cache, popular(0, 1, 2, 3), top_k=1) for _ in range(2))
    short.begin(1)
    assert rig.cache.stats().prefetches == 0  # the hottest one is asked for by four tokens in ten
    long.begin(4)
    assert residents(rig) == [[0, 1, 2]] * LAYERS  # and 3, by one in ten, hardly in four tokens
    rig.cache.settle()


@pytest.mark.parametrize("layer_slots", [None, [6, 6, 6]], ids=["one pool", "a pool a layer"])
def test_slots_are_kept_back_while_layers_run(layer_slots: list[int] | None) -> None:
    rig = CacheRig(18, FakeCopier(), num_layers=LAYERS, layer_slots=layer_slots)
    kept_back = NUM_EXPERTS if layer_slots is None else 3
    pool = 18 if layer_slots is None else 6
    ahead = PromptAhead(rig.cache, popular(*range(NUM_EXPERTS)), top_k=TOP_K)
    ahead.begin(MANY)
    for layer in range(LAYERS):
        for of_layer in range(layer, LAYERS):
            assert rig.cache.num_fetching(of_layer) <= pool - kept_back
        rig.cache.begin_layer(layer, [])
        ahead.layer_begins(layer, np.full(NUM_EXPERTS, MANY))
        ahead.fetch()
    ahead.end()
    rig.cache.settle()
    rig.cache.check()


def test_loads_take_the_place_of_layers_that_ran_not_of_those_to_come() -> None:
    """Recency alone would give the last layer away: it was used longest ago."""
    rig = CacheRig(12, HostCopier(), num_layers=LAYERS)
    for layer in (2, 0):
        for expert in range(4):
            rig.cache.load(ExpertKey(layer, expert))
        rig.cache.begin_layer(layer, [])
    rig.eviction.observe(2, np.ones(NUM_EXPERTS, np.int64))
    rig.eviction.observe(0, np.ones(NUM_EXPERTS, np.int64))
    ahead = PromptAhead(rig.cache, popular(0, 1, 2, 3), top_k=TOP_K)
    ahead.begin(4)
    ahead.layer_begins(0, np.array([9, 9, 9, 9, 0, 0, 0, 0]))
    ahead.executed([ExpertKey(0, expert) for expert in range(4)])
    ahead.layer_begins(1, np.array([9] * NUM_EXPERTS))
    for expert in range(NUM_EXPERTS):
        key = ExpertKey(1, expert)
        if rig.cache.lookup(key) is Lookup.MISS:
            assert ahead.load(key, is_urgent=False)
    assert residents(rig)[0] == []
    assert residents(rig)[2] == [0, 1, 2, 3]
    assert not rig.cache.load(ExpertKey(0, 7), protected=[ExpertKey(2, expert) for expert in range(4)])
    assert not ahead.load(ExpertKey(0, 7), is_urgent=False)
    assert ahead.load(ExpertKey(0, 7), is_urgent=True)
    assert residents(rig)[2] == [0, 1, 2]  # the least popular goes first


@pytest.mark.parametrize("is_announced", [True, False])
def test_hits_with_a_profile_and_without(is_announced: bool) -> None:
    """Two tokens: with a profile all they use is there, without one no guess is likely enough."""
    rates = []
    for has_profile in (True, False):
        rig = CacheRig(20, HostCopier(), num_layers=LAYERS)
        counts = popular(5, 1, 3) if has_profile else Popularity(LAYERS, NUM_EXPERTS)
        orchestrator = EagerOrchestrator(
            rig.cache,
            mlps=[expert_mlp(module) for module in rig.experts],
            materialize=rig.layout.view,
            eviction=rig.eviction,
            prompts=PromptAhead(rig.cache, counts, top_k=TOP_K),
        )
        index = torch.tensor([[5, 1], [1, 3]])
        with torch.no_grad(), orchestrator.pass_(Phase.PREFILL, checkpoint=lambda: None):
            if is_announced:
                orchestrator.expect_prompt(len(index))
            for layer in range(LAYERS):
                hidden = torch.randn(len(index), HIDDEN)
                orchestrator.run_layer(layer, hidden, index, torch.ones(index.shape))
        orchestrator.check()
        rates.append(rig.cache.stats().hit_rate)
    assert rates == [1.0, 0.0]
