"""What every counting predictor owes its caller, and what each one of them expects."""

from __future__ import annotations

import numpy as np
import pytest

from hetero_scheduler.predict import PREDICTORS, Forecast, RouterShape, make_predictor
from hetero_scheduler.predict.first_order import FirstOrder, learn_transitions
from hetero_scheduler.predict.frequency import Frequency
from hetero_scheduler.predict.oracle import Oracle
from hetero_scheduler.predict.routing import chosen_experts, shares
from hetero_scheduler.trace import Trace, count_uses

SHAPE = RouterShape(num_layers=5, num_experts=6, top_k=2)


def trace_of(logits: np.ndarray, bounds: list[int]) -> Trace:
    half = logits.astype(np.float16)
    return Trace(half, chosen_experts(half, 2), np.zeros(len(half), dtype=np.int32), np.array(bounds))


@pytest.fixture
def trace() -> Trace:
    """Two documents, of 12 and 8 tokens."""
    return trace_of(np.random.default_rng(3).normal(size=(20, 5, 6)), [0, 12, 20])


@pytest.mark.parametrize("name", [name for name in PREDICTORS if name != "none"])
class TestContract:
    def test_each_group_is_forecast_when_its_last_layer_has_routed(self, name: str, trace: Trace) -> None:
        predictor = make_predictor(name, SHAPE, horizon=3, trace=trace)
        assert predictor.forecast() is None
        said: dict[int, Forecast] = {}
        for layer in range(5):
            predictor.observe(4, layer, trace.logits[4, layer])
            if (forecast := predictor.forecast()) is not None:
                said[layer] = forecast
        assert {layer: one.layers for layer, one in said.items()} == {1: (0, 1), 4: (2, 3, 4)}
        assert [one.first_pos for one in said.values()] == [25, 27]
        assert said[4].positions(5).tolist() == [[27, 28, 29], [32, 33, 34], [37, 38, 39]]

    def test_probabilities_are_shares_of_each_layer(self, name: str, trace: Trace) -> None:
        predictor = make_predictor(name, SHAPE, horizon=3, num_groups=1, trace=trace)
        for step in range(5):
            for layer in range(5):
                predictor.observe(step, layer, trace.logits[step, layer])
        forecast = predictor.forecast()
        assert forecast is not None
        assert forecast.probabilities.shape == (3, 5, 6) and forecast.probabilities.dtype == np.float32
        assert (forecast.probabilities >= 0).all()
        np.testing.assert_allclose(forecast.probabilities.sum(axis=2), 1.0, rtol=1e-5)

    def test_a_reset_predictor_forgets_the_document(self, name: str, trace: Trace) -> None:
        once, twice = (make_predictor(name, SHAPE, num_groups=1, trace=trace) for _ in range(2))
        for layer in range(5):
            twice.observe(0, layer, trace.logits[7, layer])
        twice.reset()
        assert twice.forecast() is None
        for layer in range(5):
            once.observe(12, layer, trace.logits[12, layer])
            twice.observe(12, layer, trace.logits[12, layer])
        ours, theirs = once.forecast(), twice.forecast()
        assert ours is not None and theirs is not None
        np.testing.assert_array_equal(ours.probabilities, theirs.probabilities)


def test_none_never_forecasts(trace: Trace) -> None:
    predictor = make_predictor("none", SHAPE)
    predictor.observe(0, 4, trace.logits[0, 4])
    assert predictor.forecast() is None


def whole_step(predictor: Frequency | FirstOrder | Oracle, trace: Trace, step: int) -> np.ndarray:
    """`[horizon, L, E]` after all layers of `step`, from a predictor of one group."""
    for layer in range(5):
        predictor.observe(step, layer, trace.logits[step, layer])
    forecast = predictor.forecast()
    assert forecast is not None
    return forecast.probabilities


def test_the_oracle_tells_the_trace_and_stops_at_the_documents_end(trace: Trace) -> None:
    said = whole_step(Oracle(trace, horizon=4, num_groups=1), trace, 9)
    np.testing.assert_allclose(said[:2], shares(trace.logits[10:12], trace.topk[10:12]))
    assert not said[2:].any()
    only_next = whole_step(Oracle(trace, horizon=4, num_groups=1, num_seen=1), trace, 13)
    assert only_next[0].any() and not only_next[1:].any()
    assert not whole_step(Oracle(trace, num_groups=1), trace, 19).any()


def test_running_frequency_adds_to_what_was_known(trace: Trace) -> None:
    counts = count_uses(trace.topk, trace.num_experts)
    assert counts.sum() == 20 * 5 * 2
    said = whole_step(Frequency(SHAPE, num_groups=1, counts=counts), trace, 0)
    seen = counts.copy()
    np.add.at(seen, (np.arange(5)[:, None], trace.topk[0]), 1.0)
    np.testing.assert_allclose(said[0], seen / seen.sum(axis=1, keepdims=True), rtol=1e-6)
    still = whole_step(Frequency(SHAPE, num_groups=1, counts=counts, is_running=False), trace, 0)
    np.testing.assert_allclose(still[0], counts / counts.sum(axis=1, keepdims=True), rtol=1e-6)


def test_persistence_ranks_as_the_last_router_did(trace: Trace) -> None:
    predictor = make_predictor("persistence", SHAPE, num_groups=1)
    for layer in range(5):
        predictor.observe(3, layer, trace.logits[3, layer])
    forecast = predictor.forecast()
    assert forecast is not None
    np.testing.assert_array_equal(chosen_experts(forecast.probabilities[8], 2), trace.topk[3])


def test_first_order_counts_what_follows_what_within_documents() -> None:
    # experts 0 1 → 2 3 → 4 5 → 0 1 …; between the documents 0 1 → 0 1, which must not be learned
    picks = [0, 1, 2, 0, 1, 2, 0, *[0, 1, 2] * 20]
    logits = np.zeros((len(picks), 5, 6))
    for step, pick in enumerate(picks):
        logits[step, :, [2 * pick, 2 * pick + 1]] = 4.0
    trace = trace_of(logits, [0, 7, len(picks)])
    transitions = learn_transitions(trace, prior=1e-6)
    np.testing.assert_allclose(transitions[2, 0], [0, 0, 0.5, 0.5, 0, 0], atol=1e-4)
    said = whole_step(FirstOrder(SHAPE, transitions, horizon=3, num_groups=1), trace, 7)
    np.testing.assert_allclose(said[:, 4].argmax(axis=1) // 2, [1, 2, 0])


def test_shares_are_the_softmax_over_the_chosen() -> None:
    logits = np.array([[0.0, np.log(3.0), -50.0, 9.0]])
    np.testing.assert_allclose(shares(logits, np.array([[0, 1]])), [[0.25, 0.75, 0, 0]], rtol=1e-6)
    assert chosen_experts(np.array([1.0, 2.0, 2.0, 0.0]), 2).tolist() == [1, 2]


def test_a_forecast_whose_parts_do_not_fit_is_refused() -> None:
    probabilities = np.zeros((2, 2, 6), dtype=np.float32)
    with pytest.raises(ValueError, match="do not cover"):
        Forecast(probabilities, (1,), 0)
    with pytest.raises(ValueError, match="not ascending"):
        Forecast(probabilities, (2, 1), 0)


def test_what_cannot_be_made_is_refused_with_the_reason(trace: Trace) -> None:
    with pytest.raises(ValueError, match="known: none, frequency"):
        make_predictor("crystal", SHAPE)
    with pytest.raises(ValueError, match="needs a trace"):
        make_predictor("oracle", SHAPE)
    with pytest.raises(ValueError, match="do not fit"):
        make_predictor("first_order", SHAPE._replace(top_k=3), trace=trace)
    with pytest.raises(ValueError, match="do not divide"):
        make_predictor("frequency", SHAPE, num_groups=6)
    with pytest.raises(ValueError, match="horizon is 0"):
        make_predictor("frequency", SHAPE, horizon=0)
    with pytest.raises(ValueError, match="counts"):
        Frequency(SHAPE, counts=np.zeros((5, 5)))
    with pytest.raises(ValueError, match="transitions"):
        FirstOrder(SHAPE, np.zeros((5, 6, 5), dtype=np.float32))
    with pytest.raises(ValueError, match="num_seen"):
        Oracle(trace, num_seen=10)
    with pytest.raises(ValueError, match="prior"):
        learn_transitions(trace, prior=0.0)
