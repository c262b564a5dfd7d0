"""Probabilistic Belady against the formula of SeqMoE §7.1, read slowly."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_scheduler import make_eviction
from hetero_scheduler.eviction.belady_forecast import (
    RECENT_RATE,
    RECENT_WEIGHT,
    BeladyForecast,
    after_uses,
)
from hetero_scheduler.predict import Forecast

NUM_LAYERS, NUM_EXPERTS = 3, 4
ONE_TOKEN = np.array([1, 0, 0, 0])


def forecast(horizon: int, layers: tuple[int, ...] = (0, 1, 2), seed: int = 0) -> Forecast:
    rng = np.random.default_rng(seed)
    return Forecast(rng.random((horizon, len(layers), NUM_EXPERTS), dtype=np.float32), layers, NUM_LAYERS)


def by_formula(probabilities: list[float]) -> float:
    """c = 8, λ = 3/4, over at most eight runs."""
    runs = probabilities[:8]
    return math.fsum(0.75**j * p for j, p in enumerate(runs)) / math.fsum(0.75**j for j in range(len(runs)))


@settings(max_examples=50, deadline=None)
@given(horizon=st.integers(1, 12), runs=st.integers(0, 14), seed=st.integers(0, 9))
def test_the_score_is_the_papers_over_the_runs_still_to_come(horizon: int, runs: int, seed: int) -> None:
    policy = make_eviction("belady", num_layers=NUM_LAYERS, num_experts=NUM_EXPERTS)
    assert isinstance(policy, BeladyForecast)
    one = forecast(horizon, seed=seed)
    policy.observe_forecast(one)
    for _ in range(runs):
        policy.observe(1, ONE_TOKEN)
    for layer, gone in ((0, 0), (1, min(runs, horizon - 1))):
        for expert in range(NUM_EXPERTS):
            expected = by_formula(one.probabilities[gone:, layer, expert].tolist())
            is_used = layer == 1 and expert == 0
            recent = 1 - (1 - RECENT_RATE) ** runs if is_used else 0.0
            assert policy.score[layer, expert] == pytest.approx(expected + RECENT_WEIGHT * recent)


def test_recent_use_follows_each_pass_by_its_uses() -> None:
    """Eight uses of two experts, then a prompt: it replaces what was there. A layer without uses stays."""
    uses = np.array([[4, 4, 0, 0], [0, 0, 0, 0]])
    once = after_uses(np.zeros((2, 4)), uses)
    assert once[0].tolist() == [0.5 / 16, 0.5 / 16, 0.0, 0.0]
    assert after_uses(once, 100 * uses[:, ::-1])[0].tolist() == [0.0, 0.0, 0.5, 0.5]
    assert after_uses(once, uses)[1].tolist() == [0.0] * 4


def test_of_experts_that_no_forecast_wants_the_recently_used_stays() -> None:
    policy = BeladyForecast(NUM_LAYERS, NUM_EXPERTS)
    policy.observe_forecast(Forecast(np.zeros((3, 1, NUM_EXPERTS), dtype=np.float32), (1,), 1))
    policy.observe(1, ONE_TOKEN)
    assert policy.score[1].argmax() == 0
    policy.observe_forecast(Forecast(np.float32([[[0, 0, 0.1, 0]]]), (1,), 4))
    assert policy.score[1].argsort()[-2:].tolist() == [0, 2]


def test_a_new_forecast_replaces_the_old_for_its_layers_only() -> None:
    policy = BeladyForecast(NUM_LAYERS, NUM_EXPERTS)
    policy.observe_forecast(forecast(9))
    before = policy.score.copy()
    policy.observe_forecast(forecast(9, layers=(1, 2), seed=1))
    np.testing.assert_array_equal(policy.score[0], before[0])
    assert (policy.score[1:] != before[1:]).all()


def test_without_a_forecast_it_is_lru_below_every_forecast() -> None:
    policy = BeladyForecast(NUM_LAYERS, NUM_EXPERTS)
    policy.observe(0, np.array([1, 1, 0, 0]))
    policy.observe(1, ONE_TOKEN)
    policy.observe(0, ONE_TOKEN)
    used = [policy.score[0, 1], policy.score[1, 0], policy.score[0, 0]]  # oldest first
    assert used == sorted(used) and used[0] > policy.score[0, 2] == -np.inf
    policy.observe_forecast(Forecast(np.zeros((1, 1, NUM_EXPERTS), dtype=np.float32), (2,), 2))
    assert (policy.score[2] > used[-1]).all()


@pytest.mark.parametrize("wrong", [{"num_steps": 0}, {"decay": 0.0}, {"decay": 1.0}])
def test_impossible_windows_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        BeladyForecast(1, 1, **wrong)  # type: ignore[arg-type]
