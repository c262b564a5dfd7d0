"""Belady's scores for several texts: each has a window, an expert stays while any of them wants it."""

from __future__ import annotations

import numpy as np
import pytest

from hetero_scheduler.eviction.belady_forecast import BeladyForecast
from hetero_scheduler.eviction.belady_rows import BeladyRows
from hetero_scheduler.predict import Forecast

NUM_LAYERS, NUM_EXPERTS = 3, 4


def forecast(seed: int, layers: tuple[int, ...] = (0, 1, 2)) -> Forecast:
    rng = np.random.default_rng(seed)
    return Forecast(rng.random((9, len(layers), NUM_EXPERTS), dtype=np.float32), layers, NUM_LAYERS)


def used(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 2, NUM_EXPERTS)


def test_one_row_is_the_policy_of_one_text() -> None:
    alone, rows = BeladyForecast(NUM_LAYERS, NUM_EXPERTS), BeladyRows(NUM_LAYERS, NUM_EXPERTS, num_rows=4)
    rows.turn_to(0, active=[0])
    for step in range(6):
        for layer in range(NUM_LAYERS):
            for policy in (alone, rows):
                policy.observe(layer, used(step))
                if step > 1 and layer == 1:
                    policy.observe_forecast(forecast(step, layers=(0, 1)))
            assert np.array_equal(rows.score, alone.score)
    assert np.array_equal(rows.passes, alone.passes)


def test_an_expert_stays_while_any_active_row_wants_it() -> None:
    rows = BeladyRows(NUM_LAYERS, NUM_EXPERTS, num_rows=3)
    alone = [BeladyForecast(NUM_LAYERS, NUM_EXPERTS) for _ in range(3)]
    for row in (0, 2):
        rows.turn_to(row, active=[0, 2])
        for policy in (rows, alone[row]):
            policy.observe_forecast(forecast(row))
            policy.observe(1, used(row))
    assert np.array_equal(rows.score, np.maximum(alone[0].score, alone[2].score))
    rows.turn_to(2, active=[2])
    assert np.array_equal(rows.score, alone[2].score)


def test_a_policy_needs_a_row() -> None:
    with pytest.raises(ValueError, match="num_rows is 0"):
        BeladyRows(NUM_LAYERS, NUM_EXPERTS, num_rows=0)
