"""The compiled replay makes the slot machine's decisions, each of them."""

from __future__ import annotations

import time

import numpy as np
import pytest

from hetero_scheduler import ExpertKey, Lookup, SlotMachine, SlotState
from hetero_scheduler.simulator.fast import CacheReplay, replay_cache
from hetero_scheduler.simulator.policies import make_eviction_for
from hetero_scheduler.simulator.scenario import Pool, pool_ranges
from hetero_scheduler.simulator.use_scores import FAST_POLICIES, use_scores
from hetero_scheduler.trace import Trace
from tests.scheduler.simulator.traces import random_trace, structured_trace

SHAPES = ((300, 1, 8, 1), (200, 3, 8, 2), (150, 4, 16, 4), (60, 5, 24, 7))
POOLS: tuple[Pool, ...] = ("global", "per_layer")


def slot_machine_replay(trace: Trace, policy: str, slots: list[int], pool: Pool) -> CacheReplay:
    """The same by the slot machine and the policy that serve, in the order of the slab cache's verbs."""
    eviction = make_eviction_for(policy, trace)
    machine = SlotMachine(
        sum(slots),
        num_layers=trace.num_layers,
        num_experts=trace.num_experts,
        layer_slots=slots if pool == "per_layer" else None,
    )
    replay = CacheReplay(np.empty(trace.topk.shape, np.int32), np.empty(trace.topk.shape, np.bool_))
    for step, layer in np.ndindex(*trace.topk.shape[:2]):
        needed = np.sort(trace.topk[step, layer]).tolist()
        keys = [ExpertKey(layer, expert) for expert in needed]
        eviction.observe(layer, np.bincount(needed, minlength=trace.num_experts))
        replay.is_hit[step, layer] = [machine.lookup(key) is Lookup.HIT for key in keys]
        for key in keys:
            if machine.lookup(key) is Lookup.MISS:
                held = machine.reserve(key, SlotState.COMPUTE, score=eviction.score, protected=keys)
                assert held is not None
        replay.slot[step, layer] = [machine.slot(key) for key in keys]
        machine.release_layer(layer)
    machine.check()
    return replay


@pytest.mark.parametrize("policy", FAST_POLICIES)
@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("make_trace", [random_trace, structured_trace], ids=["random", "structured"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_decision_is_the_slot_machines(policy, pool, make_trace, shape) -> None:  # type: ignore[no-untyped-def]
    trace = make_trace(*shape)
    # as few as a layer needs, and about a third more
    for share in (trace.top_k, trace.top_k + trace.num_experts // 4):
        slots = [share] * trace.num_layers
        needed = np.sort(trace.topk, axis=-1).astype(np.int32)
        fast = replay_cache(
            needed,
            use_scores(policy, needed, num_experts=trace.num_experts),
            pool_ranges(slots, pool),
            num_experts=trace.num_experts,
        )
        reference = slot_machine_replay(trace, policy, slots, pool)
        np.testing.assert_array_equal(fast.is_hit, reference.is_hit)
        np.testing.assert_array_equal(fast.slot, reference.slot)


@pytest.mark.parametrize("pool", POOLS)
def test_a_big_model_in_seconds(pool: Pool, capsys: pytest.CaptureFixture[str]) -> None:
    trace = structured_trace(500, 48, 128, 8)
    needed = np.sort(trace.topk, axis=-1).astype(np.int32)
    for policy in FAST_POLICIES:
        began = time.perf_counter()
        scores = use_scores(policy, needed, num_experts=128)
        fast = replay_cache(needed, scores, pool_ranges([32] * 48, pool), num_experts=128)
        with capsys.disabled():
            print(f"\n{policy}, {pool}: 500 tokens in {time.perf_counter() - began:.2f} s", end="")
        assert 0.25 < fast.is_hit.mean() < 1


def test_an_unknown_policy_is_named() -> None:
    with pytest.raises(ValueError, match="no fast replay of 'belady'"):
        use_scores("belady", np.zeros((1, 1, 1), np.int32), num_experts=1)
