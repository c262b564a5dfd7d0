"""Forecasts made anew when more is known: when, of what, and by what arithmetic."""

from __future__ import annotations

import numpy as np
import pytest

from hetero_scheduler.predict.base import Forecast
from hetero_scheduler.predict.refined import Refined
from hetero_scheduler.predict.refinement import Refinement
from tests.scheduler.predict.test_mamba2 import EXPERTS, LAYERS, make_predictor, make_trace

RANK, TOKENS = 3, 5


def make_refinement(*, has_pool: bool = True) -> Refinement:
    draw = np.random.default_rng(1)

    def normal(*shape: int) -> np.ndarray:
        return draw.normal(size=shape).astype(np.float32)

    return Refinement(
        scale=1 + 0.1 * normal(LAYERS),
        embedding=normal(TOKENS, RANK),
        head=normal(LAYERS, EXPERTS, RANK),
        bias=normal(LAYERS, EXPERTS),
        pool=np.abs(normal(LAYERS, 2)) if has_pool else None,
    )


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def even_shares() -> np.ndarray:
    return softmax(np.random.default_rng(2).normal(size=(LAYERS, EXPERTS))).astype(np.float32)


def test_a_known_token_multiplies_shares() -> None:
    weights, shares = make_refinement(), even_shares()
    expected = np.stack(
        [
            softmax(
                weights.scale[layer] * np.log(shares[layer])
                + weights.head[layer] @ weights.embedding[4]
                + weights.bias[layer]
            )
            for layer in range(LAYERS)
        ]
    )
    np.testing.assert_allclose(weights.with_tokens(shares, np.array(4)), expected, rtol=1e-5)
    both = weights.with_tokens(np.stack([shares, shares]), np.array([4, 1]))
    np.testing.assert_allclose(both[0], expected, rtol=1e-5)
    assert not np.allclose(both[1], expected, rtol=1e-2)


@pytest.mark.parametrize("token", [TOKENS, 10**6])
def test_a_token_that_training_never_met_adds_nothing_of_its_own(token: int) -> None:
    weights, shares = make_refinement(), even_shares()
    expected = softmax(weights.scale[:, None] * np.log(shares) + weights.bias)
    np.testing.assert_allclose(weights.with_tokens(shares, np.array(token)), expected, rtol=1e-5)


def test_the_next_router_is_weighed_against_the_forecast() -> None:
    weights, shares = make_refinement(), even_shares()
    assert weights.pool is not None
    logits = np.random.default_rng(3).normal(size=(1, EXPERTS)).astype(np.float16)
    found = weights.with_next_router(shares[1:2], logits, slice(1, 2))
    (first, second) = weights.pool[1]
    expected = softmax(first * np.log(shares[1]) + second * np.log(softmax(logits[0].astype(np.float32))))
    np.testing.assert_allclose(found[0], expected, rtol=1e-4)


def test_parts_that_do_not_fit_are_refused() -> None:
    whole = vars(make_refinement())
    with pytest.raises(ValueError, match="do not fit together"):
        Refinement(**{**whole, "bias": whole["bias"][:1]})
    without = make_refinement(has_pool=False)
    with pytest.raises(ValueError, match="nothing of routers"):
        without.with_next_router(even_shares(), np.zeros((LAYERS, EXPERTS)), slice(0, LAYERS))
    with pytest.raises(ValueError, match="the layer horizon of 3"):
        Refined(make_predictor(), without, num_layers=LAYERS, nearest="layer")
    with pytest.raises(ValueError, match="a refinement of 3 layers"):
        Refined(make_predictor(), without, num_layers=4, nearest="token")


def test_a_step_is_foreseen_three_times_and_its_later_runs_stay() -> None:
    weights, trace = make_refinement(), make_trace(3)
    plain = make_predictor()
    refined = Refined(make_predictor(), weights, num_layers=LAYERS, nearest="layer")
    assert refined.asks_early
    assert refined.begin_step(0, 1) is None, "nothing is known before the first step"
    assert refined.observe_next(0, 1, trace.logits[0, 1]) is None
    said: dict[int, Forecast] = {}
    for layer in range(LAYERS):
        for predictor in (plain, refined):
            predictor.observe(0, layer, trace.logits[0, layer])
        forecast, expected = refined.forecast(), plain.forecast()
        assert (forecast is None) == (expected is None)
        if forecast is not None and expected is not None:
            np.testing.assert_array_equal(forecast.probabilities, expected.probabilities)
            said |= dict.fromkeys(forecast.layers, forecast)
    known = refined.begin_step(1, 4)
    assert known is not None
    assert (known.layers, known.first_pos) == ((0, 1, 2), LAYERS)
    before = np.stack(
        [said[layer].probabilities[:, said[layer].layers.index(layer)] for layer in range(LAYERS)], axis=1
    )
    np.testing.assert_array_equal(known.probabilities[1:], before[1:])
    np.testing.assert_allclose(known.probabilities[0], weights.with_tokens(before[0], np.array(4)))
    near = refined.observe_next(1, 2, trace.logits[1, 2])
    assert near is not None
    assert (near.layers, near.first_pos) == ((2,), LAYERS + 2)
    np.testing.assert_array_equal(near.probabilities[1:, 0], before[1:, 2])
    expected_near = weights.with_next_router(known.probabilities[0, 2:], trace.logits[1, 2:], slice(2, 3))
    np.testing.assert_allclose(near.probabilities[0], expected_near)


def test_refining_changes_nothing_of_what_comes_after() -> None:
    """Whatever was said early, the next forecast is of the predictor's own state."""
    weights, trace = make_refinement(), make_trace(4)
    plain = make_predictor()
    refined = Refined(make_predictor(), weights, num_layers=LAYERS, nearest="layer")
    for step in range(4):
        refined.begin_step(step, step)
        for layer in range(LAYERS):
            for predictor in (plain, refined):
                predictor.observe(step, layer, trace.logits[step, layer])
            if layer + 1 < LAYERS:
                refined.observe_next(step, layer + 1, trace.logits[step, layer + 1])
    last, expected = refined.forecast(), plain.forecast()
    assert last is not None
    assert expected is not None
    np.testing.assert_array_equal(last.probabilities, expected.probabilities)
    refined.reset()
    assert refined.begin_step(0, 1) is None
