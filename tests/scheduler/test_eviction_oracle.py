"""Oracles on random traces: their scores by definition, and Belady's MIN against brute force."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_scheduler import EvictionPolicy, ExpertKey, Lookup, SlotMachine, SlotState, make_eviction
from hetero_scheduler.eviction.oracle import ORACLES, OracleBelady, OracleScore, make_oracle
from hetero_scheduler.trace import Trace

NUM_LAYERS, NUM_EXPERTS = 2, 6


def trace_of(topk: np.ndarray) -> Trace:
    """`topk` `[T, L, K]`"""
    num_tokens, num_layers, _ = topk.shape
    return Trace(
        logits=np.zeros((num_tokens, num_layers, NUM_EXPERTS), dtype=np.float16),
        topk=topk,
        tokens=np.zeros(num_tokens, dtype=np.int32),
        bounds=np.array([0, num_tokens]),
    )


def random_trace(num_tokens: int, *, top_k: int = 2, seed: int = 0) -> Trace:
    rng = np.random.default_rng(seed)
    weights = np.arange(1, NUM_EXPERTS + 1) / np.arange(1, NUM_EXPERTS + 1).sum()
    draws = [rng.choice(NUM_EXPERTS, top_k, replace=False, p=weights) for _ in range(num_tokens * NUM_LAYERS)]
    return trace_of(np.array(draws).reshape(num_tokens, NUM_LAYERS, top_k))


def misses(trace: Trace, policy: EvictionPolicy, num_slots: int) -> int:
    """Loads that the slot machine makes for `trace` in one pool, without prefetch."""
    slots = SlotMachine(num_slots, num_layers=trace.num_layers, num_experts=NUM_EXPERTS)
    count = 0
    for step in range(trace.num_tokens):
        for layer in range(trace.num_layers):
            wanted = [ExpertKey(layer, int(expert)) for expert in trace.topk[step, layer]]
            policy.observe(layer, np.bincount(trace.topk[step, layer], minlength=NUM_EXPERTS))
            for key in wanted:
                if slots.lookup(key) is Lookup.MISS:
                    count += 1
                    held = slots.reserve(key, SlotState.COMPUTE, score=policy.score, protected=wanted)
                    assert held is not None
            slots.release_layer(layer)
    return count


def fewest_misses(trace: Trace, num_slots: int) -> int:
    """Over all choices of what to evict, top-1 traces."""
    uses = [
        (layer, int(trace.topk[t, layer, 0])) for t in range(trace.num_tokens) for layer in range(NUM_LAYERS)
    ]

    @cache
    def least(index: int, held: frozenset[tuple[int, int]]) -> int:
        if index == len(uses):
            return 0
        key = uses[index]
        if key in held:
            return least(index + 1, held)
        if len(held) < num_slots:
            return 1 + least(index + 1, held | {key})
        return 1 + min(least(index + 1, (held - {gone}) | {key}) for gone in held)

    return least(0, frozenset())


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000), num_slots=st.integers(1, 4))
def test_belady_misses_as_little_as_possible(seed: int, num_slots: int) -> None:
    trace = random_trace(7, top_k=1, seed=seed)
    assert misses(trace, OracleBelady(trace), num_slots) == fewest_misses(trace, num_slots)


def test_knowing_more_misses_less() -> None:
    trace = random_trace(300)
    lru = make_eviction("lru", num_layers=NUM_LAYERS, num_experts=NUM_EXPERTS)
    counts = [misses(trace, OracleBelady(trace, window=window), 6) for window in (None, 2, 1)]
    assert counts == sorted(counts) and counts[0] < counts[-1] < misses(trace, lru, 6)


def test_belady_8_orders_what_it_sees_by_next_use_and_the_rest_by_last_use() -> None:
    rows = [[0, 1], [2, 3], [0, 4], *[[4, 5]] * 9, [3, 1], [2, 3]]  # layer 0; 3 is used next at step 12
    topk = np.array([[row, [0, 1]] for row in rows])
    policy = OracleBelady(trace_of(topk), window=8)
    for step in range(3):
        for layer in range(NUM_LAYERS):
            policy.observe(layer, np.bincount(topk[step, layer], minlength=NUM_EXPERTS))
    order = np.argsort(-policy.score[0], kind="stable").tolist()
    # seen: 4 and 5 at step 3; not seen within 10: 0 (last at 2), 2 and 3 (last at 1), 1 (last at 0)
    assert order == [4, 5, 0, 2, 3, 1]
    assert policy.score[0, 4] == -(3 * NUM_LAYERS) and policy.score[1, 0] == -(3 * NUM_LAYERS + 1)


@pytest.mark.parametrize("decay", [0.5, 1.0])
def test_the_score_oracle_counts_the_window_with_decay(decay: float) -> None:
    trace = random_trace(30)
    policy = OracleScore(trace, window=8, decay=decay)
    for step in range(-1, 30):
        for layer in range(NUM_LAYERS):
            if step >= 0:
                policy.observe(layer, np.bincount(trace.topk[step, layer], minlength=NUM_EXPERTS))
            for expert in range(NUM_EXPERTS):
                coming = [expert in trace.topk[t, layer] for t in range(step + 1, min(step + 9, 30))]
                expected = sum(decay**j * used for j, used in enumerate(coming))
                assert policy.score[layer, expert] == pytest.approx(
                    expected / sum(decay**j for j in range(8))
                )


@pytest.mark.parametrize("name", ORACLES)
def test_another_routing_than_the_traces_is_noticed(name: str) -> None:
    trace = random_trace(5)
    policy = make_oracle(name, trace)
    other = np.ones(NUM_EXPERTS, dtype=np.int64)
    other[trace.topk[0, 0, 0]] = 0
    with pytest.raises(AssertionError, match="step 0 of layer 0"):
        policy.observe(0, other)


def test_unknown_oracles_and_windows_are_refused() -> None:
    trace = random_trace(5)
    with pytest.raises(ValueError, match="oracle_belady, oracle_belady_8"):
        make_oracle("delphi", trace)
    with pytest.raises(ValueError, match="window is 0"):
        OracleBelady(trace, window=0)
    with pytest.raises(ValueError, match="window 0"):
        OracleScore(trace, window=0)
