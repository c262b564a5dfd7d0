"""Lookahead eviction: who is guarded, who leaves last, and that a layer always gets what it needs."""

from __future__ import annotations

import numpy as np
import pytest

from hetero_scheduler import ExpertKey, SlotMachine, SlotState, make_eviction
from hetero_scheduler.eviction.lookahead import Lookahead, greatest
from hetero_scheduler.predict import Forecast
from hetero_scheduler.simulator import Scenario, simulate
from hetero_scheduler.trace import Trace

NUM_LAYERS, NUM_EXPERTS = 6, 4


def tokens(*experts: int) -> np.ndarray:
    return np.bincount(experts, minlength=NUM_EXPERTS)


def forecast(layer: int, *shares: float) -> Forecast:
    return Forecast(np.array(shares, dtype=np.float32)[None, None], (layer,), layer)


def policy(*, window: int = 2, size: int = 2) -> Lookahead:
    return Lookahead(NUM_LAYERS, NUM_EXPERTS, window=window, size=size)


def guarded(one: Lookahead) -> list[int]:
    """Layers whose experts no prefetch may drive out."""
    return np.flatnonzero(np.isinf(one.prefetch_score).all(axis=1)).tolist()


def test_the_window_is_guarded_round_the_end_of_a_pass() -> None:
    one = policy()
    found = []
    for layer in (0, 3, 4, 5):
        one.observe(layer, tokens(0))
        found.append(guarded(one))
    assert found == [[1, 2], [4, 5], [0, 5], [0, 1]]


def test_required_ones_leave_last_and_of_all_others_the_least_priority_first() -> None:
    one = policy(size=2)
    one.observe(1, tokens(0, 1))  # ran, and lies outside the window of layer 2
    one.observe(2, tokens(3))
    one.observe_forecast(forecast(3, 0.4, 0.3, 0.2, 0.1))
    one.observe_forecast(forecast(4, 0.9, 0.0, 0.0, 0.1))
    required = [one.score[4, 0], one.score[3, 0]]  # 0.8 of 0.9, and 0.4
    speculative = [one.score[3, 1], one.score[3, 2], one.score[4, 3], one.score[4, 1]]
    expired = [one.score[1, 0], one.score[1, 3], one.score[5, 0]]
    assert required == pytest.approx([2.72, 2.4])
    assert speculative == pytest.approx([0.3, 0.2, 0.08, 0.0])
    assert expired == pytest.approx([0.25, 0.0, 0.0])


def test_what_was_foreseen_of_a_run_is_averaged_into_the_runs_before() -> None:
    one = policy()
    for _ in range(2):
        one.observe_forecast(forecast(0, 0.6, 0.4, 0.0, 0.0))
        one.observe(0, tokens(3))  # the forecast was wrong; the priority is its word
    one.observe(3, tokens(0))
    assert one.score[0] == pytest.approx([0.45, 0.3, 0.0, 0.0])


@pytest.mark.parametrize("count", [1, 3, 11, 12, 20])
@pytest.mark.parametrize("num_values", [1, 2, 9])
def test_the_greatest_are_the_first_of_a_stable_sort(count: int, num_values: int) -> None:
    values = np.random.default_rng(count).integers(0, num_values, size=(3, 4)).astype(np.float64)
    expected = np.zeros(12, dtype=np.bool_)
    expected[np.argsort(-values, axis=None, kind="stable")[:count]] = True
    assert np.array_equal(greatest(values, count).reshape(-1), expected)


def test_a_prefetch_takes_expired_experts_only_and_a_load_takes_what_it_must() -> None:
    one = policy()
    slots = SlotMachine(2, num_layers=NUM_LAYERS, num_experts=NUM_EXPERTS)
    for key in (ExpertKey(2, 0), ExpertKey(3, 0)):
        held = slots.reserve(key, SlotState.COMPUTE, score=one.score)
        assert held is not None
        slots.release(key)
    one.observe(1, tokens(1))
    wanted = ExpertKey(3, 1)
    assert slots.reserve(wanted, SlotState.FETCH, score=one.prefetch_score) is None
    one.observe(2, tokens(1))  # layer 2 has run: its expert is expired
    held = slots.reserve(wanted, SlotState.FETCH, score=one.prefetch_score)
    assert held is not None and held.evicted == ExpertKey(2, 0)
    loaded = slots.reserve(ExpertKey(2, 1), SlotState.COMPUTE, score=one.score)
    assert loaded is not None and loaded.evicted == ExpertKey(3, 0)


def test_a_shallow_model_has_expired_experts_too() -> None:
    one = Lookahead(3, NUM_EXPERTS)
    one.observe(0, tokens(0))
    assert guarded(one) == [1]
    alone = Lookahead(1, NUM_EXPERTS)
    alone.observe(0, tokens(0))
    assert guarded(alone) == []


def test_restored_scores_are_what_is_kept() -> None:
    one = policy()
    one.observe(0, tokens(0))
    score = np.arange(NUM_LAYERS * NUM_EXPERTS, dtype=np.float64).reshape(NUM_LAYERS, NUM_EXPERTS) / 24
    one.restore(score, np.ones(NUM_LAYERS, dtype=np.int64))
    assert guarded(one) == []
    one.observe(3, tokens(0))
    assert one.score[1] == pytest.approx(score[1])


def test_recent_use_goes_on_from_shares_and_hands_back_shares() -> None:
    one = policy()
    for layer in range(NUM_LAYERS):  # a prompt: expert 0 of each layer has 3 of 4 tokens
        one.observe(layer, tokens(0, 0, 0, 1))
    recent = one.recent()
    assert recent.score[:, 0] == pytest.approx(0.375) and recent.score[:, 1] == pytest.approx(0.125)
    for experts in ((1, 2), (2, 3)):
        for layer in range(NUM_LAYERS):
            recent.observe(layer, tokens(*experts))
    order = np.argsort(recent.score[0])
    assert order[:2].tolist() == [0, 1] and recent.score[0, 2] == recent.score[0, 3]
    one.resume(recent)
    assert one.kept[2] == pytest.approx([0.375 / 4, 0.125, 0.25, 0.25])
    assert one.passes.tolist() == [3] * NUM_LAYERS


def test_before_any_pass_there_are_no_shares_to_go_on_from() -> None:
    with pytest.raises(AssertionError, match="no pass was observed"):
        policy().recent()


@pytest.mark.parametrize("wrong", [{"window": 0}, {"size": 0}, {"decay": 0.0}, {"decay": 1.5}])
def test_impossible_windows_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        Lookahead(2, 2, **wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("schedule", ["none", "top_b"])
@pytest.mark.parametrize("residency", [0.1, 0.5])
def test_with_perfect_forecasts_it_hits_more_than_lru(schedule: str, residency: float) -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(60, 4, 16)).astype(np.float16)
    topk = np.argsort(-logits, axis=-1)[..., :2].astype(np.int32)
    trace = Trace(logits, topk, np.zeros(60, np.int32), np.array([0, 60]))
    scenario = Scenario(eviction="lookahead", schedule=schedule, predictor="oracle", residency=residency)
    lru = simulate(trace, Scenario(residency=residency))
    assert simulate(trace, scenario).hit_rate > lru.hit_rate


def test_it_goes_by_its_name() -> None:
    assert isinstance(make_eviction("lookahead", num_layers=2, num_experts=2), Lookahead)
