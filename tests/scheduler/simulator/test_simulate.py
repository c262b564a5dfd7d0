"""Whole simulations: bounds, conservation, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hetero_scheduler.prefetch import SCHEDULES
from hetero_scheduler.simulator import Machine, Pool, Scenario, SimulationResult, simulate
from hetero_scheduler.simulator.use_scores import FAST_POLICIES
from hetero_scheduler.trace import Trace
from tests.scheduler.simulator.traces import random_trace, structured_trace, trace_of

POOLS: tuple[Pool, ...] = ("global", "per_layer")
# one expert takes as long as one layer
MACHINE = Machine(layer_ms=1.0, record_bytes=1_000_000, link_gb_s=1.0)


def run(trace: Trace, **options: Any) -> SimulationResult:
    return simulate(trace, Scenario(**{"machine": MACHINE, **options}))


@pytest.mark.parametrize("policy", FAST_POLICIES)
@pytest.mark.parametrize("pool", POOLS)
def test_both_replays_give_the_same_result(policy: str, pool: Pool) -> None:
    trace = structured_trace(120, 4, 16, 3)
    scenario = Scenario(eviction=policy, pool=pool, residency=0.3, machine=MACHINE)
    fast, reference = simulate(trace, scenario), simulate(trace, scenario, is_reference=True)
    assert fast.counts.stall_ms == pytest.approx(reference.counts.stall_ms)
    assert (fast.counts.hits, fast.counts.misses) == (reference.counts.hits, reference.counts.misses)
    assert fast.to_json().keys() == reference.to_json().keys()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("make_trace", [random_trace, structured_trace], ids=["random", "structured"])
@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("residency", [0.2, 0.5])
def test_nothing_beats_belady(make_trace: Any, pool: Pool, seed: int, residency: float) -> None:
    trace = make_trace(200, 3, 20, 2, seed=seed)

    def hit_rate(policy: str) -> float:
        return run(trace, eviction=policy, pool=pool, residency=residency, uncounted=0.0).hit_rate

    best, eight = hit_rate("oracle_belady"), hit_rate("oracle_belady_8")
    assert best >= eight
    for policy in ("lru", "lfu", "lfru"):
        assert best >= hit_rate(policy)
        assert eight >= hit_rate(policy)


@pytest.mark.parametrize("eviction", ["lru", "oracle_belady", "oracle_score_8"])
@pytest.mark.parametrize("pool", POOLS)
def test_with_all_experts_resident_only_first_uses_miss(eviction: str, pool: Pool) -> None:
    trace = structured_trace(150, 3, 12, 2)
    used = {(layer, expert) for token in trace.topk for layer in range(3) for expert in token[layer].tolist()}
    result = run(trace, eviction=eviction, pool=pool, residency=1.0, uncounted=0.0)
    assert result.counts.misses == len(used)
    assert result.static_hit_rate == 1.0
    assert run(trace, eviction=eviction, pool=pool, residency=1.0, uncounted=0.8).hit_rate == 1.0


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("pool", POOLS)
def test_a_perfect_forecast_prefetches_what_the_cache_misses(schedule: str, pool: Pool) -> None:
    trace = structured_trace(120, 6, 16, 2)
    alone = run(trace, eviction="lru", pool=pool, residency=0.3)
    ahead = run(trace, eviction="lru", pool=pool, residency=0.3, schedule=schedule, predictor="oracle_next")
    assert ahead.hit_rate > alone.hit_rate
    assert ahead.full_load_share > alone.full_load_share
    assert ahead.counts.required == ahead.counts.hits + ahead.counts.late + ahead.counts.misses
    assert 0.9 < ahead.precision <= 1
    assert ahead.link_share <= 1


@pytest.mark.parametrize("predictor", ["frequency", "persistence", "oracle", "oracle_next"])
def test_forecasts_steer_eviction(predictor: str) -> None:
    trace = structured_trace(150, 4, 16, 2)
    result = run(trace, eviction="belady", predictor=predictor, residency=0.3)
    assert result.counts.prefetches == 0
    assert result.counts.forecasts == 135 * 2
    if predictor == "oracle":
        assert result.hit_rate > run(trace, eviction="lru", residency=0.3).hit_rate


def test_time_of_forecasts_counts() -> None:
    trace = trace_of(np.tile([0, 1], (60, 4, 1)), num_experts=16)
    options: dict[str, Any] = {
        "eviction": "belady",
        "predictor": "persistence",
        "residency": 1.0,
        "uncounted": 0.9,
    }
    machine = Machine(layer_ms=1.0, record_bytes=1_000_000, link_gb_s=1.0, forecast_ms=0.5)
    # four layers of 1 ms and two forecasts of 0.5 ms a token
    assert run(trace, **options).full_load_share == pytest.approx(1.0)
    assert run(trace, **options, machine=machine).full_load_share == pytest.approx(4 / 5)
    assert run(trace, **options, machine=machine).tok_s == pytest.approx(1000 / 5)


def test_static_hit_rate_and_entropy_by_hand() -> None:
    # layer 0: expert 0 three times, 1 once; layer 1: each of four experts once
    trace = trace_of([[[0], [0]], [[0], [1]], [[1], [2]], [[0], [3]]], num_experts=4)
    result = run(trace, residency=0.25, pool="per_layer", uncounted=0.0)
    assert result.static_hit_rate == pytest.approx((3 + 1) / 8)
    entropy = -(0.75 * np.log(0.75) + 0.25 * np.log(0.25)) / np.log(4)
    assert result.load_entropy == pytest.approx((entropy + 1) / 2)
    assert result.load_entropy == pytest.approx(trace.load_entropy())
    # expert 0 of layer 0 again twice: two hits of eight; 6 misses of 1 ms beside 8 layers of 1 ms
    assert result.hit_rate == pytest.approx(1 / 8)
    assert result.full_load_share == pytest.approx(8 / 15)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"residency": 0.0}, "residency is 0.0"),
        ({"residency": 0.05}, "fewer slots than the 2"),
        ({"uncounted": 1.0}, "uncounted is 1.0"),
        ({"extra": -1}, "extra is -1"),
        ({"pool": "shared"}, "unknown pool 'shared'"),
        ({"eviction": "fifo"}, "unknown eviction 'fifo'; known: lru"),
        ({"schedule": "soon"}, "unknown schedule 'soon'; known: none, jsd"),
        ({"predictor": "tea"}, "unknown predictor 'tea'; known: none"),
        ({"schedule": "jsd"}, "acts on forecasts; choose a predictor: frequency"),
        ({"eviction": "belady"}, "acts on forecasts"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(random_trace(10, 2, 8, 2), **{"pool": "per_layer", **options})


@pytest.mark.parametrize("field", ["layer_ms", "link_gb_s", "record_bytes", "copies_in_flight"])
def test_a_machine_that_cannot_be_is_refused(field: str) -> None:
    with pytest.raises(ValueError, match=f"{field} is 0"):
        Machine(**{field: 0})
