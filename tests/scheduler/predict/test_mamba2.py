"""The predictor's contract: when it speaks, of what, and that speaking changes nothing."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hetero_scheduler.predict.base import Forecast
from hetero_scheduler.predict.mamba2 import Mamba2Predictor
from hetero_scheduler.predict.mamba2_block import Mamba2Sizes
from hetero_scheduler.predict.mamba2_model import GroupModel, GroupShape
from hetero_scheduler.predict.routing import layer_groups
from hetero_scheduler.trace import Trace

LAYERS, EXPERTS, TOP_K = 3, 6, 2
SIZES = Mamba2Sizes(d_model=16, state_size=8, head_dim=8, chunk=4)


def make_predictor(horizon: int = 8) -> Mamba2Predictor:
    torch.manual_seed(0)
    shapes = [GroupShape(len(group), EXPERTS, TOP_K, sizes=SIZES) for group in layer_groups(LAYERS)]
    return Mamba2Predictor([GroupModel(shape) for shape in shapes], horizon)


def make_trace(steps: int) -> Trace:
    logits = np.random.default_rng(0).normal(size=(steps, LAYERS, EXPERTS)).astype(np.float16)
    topk = np.argsort(-logits, axis=-1)[..., :TOP_K]
    return Trace(logits, topk, np.zeros(steps, dtype=np.int32), np.array([0, steps]))


def observe(predictor: Mamba2Predictor, trace: Trace, steps: range) -> dict[tuple[int, int], Forecast]:
    """Forecasts by the step and layer after which they appeared."""
    found = {}
    for step in steps:
        for layer in range(LAYERS):
            predictor.observe(step, layer, trace.logits[step, layer])
            if (forecast := predictor.forecast()) is not None:
                found[step, layer] = forecast
    return found


@pytest.mark.parametrize(
    ("num_layers", "num_groups", "lengths"), [(8, 2, [4, 4]), (3, 2, [2, 1]), (5, 3, [2, 1, 2]), (4, 1, [4])]
)
def test_groups_cover_the_layers_without_a_gap(num_layers: int, num_groups: int, lengths: list[int]) -> None:
    groups = layer_groups(num_layers, num_groups)
    assert [len(group) for group in groups] == lengths
    assert [layer for group in groups for layer in group] == list(range(num_layers))


def test_more_groups_than_layers_are_refused() -> None:
    with pytest.raises(ValueError, match="do not divide into 3 groups"):
        layer_groups(2, 3)


def test_each_group_speaks_after_its_last_layer_of_the_steps_after() -> None:
    forecasts = observe(make_predictor(), make_trace(2), range(2))
    assert list(forecasts) == [(0, 1), (0, 2), (1, 1), (1, 2)]
    assert [forecast.layers for forecast in forecasts.values()] == [(0, 1), (2,)] * 2
    assert [forecast.first_pos for forecast in forecasts.values()] == [3, 5, 6, 8]
    for forecast in forecasts.values():
        assert forecast.probabilities.shape == (8, len(forecast.layers), EXPERTS)
        np.testing.assert_allclose(forecast.probabilities.sum(-1), 1.0, rtol=1e-5)


def test_recursive_prediction_does_not_change_later_one_step_predictions() -> None:
    trace = make_trace(6)
    long, short = (observe(make_predictor(horizon), trace, range(6)) for horizon in (8, 1))
    for moment, forecast in long.items():
        np.testing.assert_array_equal(forecast.probabilities[:1], short[moment].probabilities)


def test_recursion_feeds_a_prediction_back_as_the_next_state() -> None:
    model = make_predictor().models[0]
    state = model.initial_state(1)
    logits, state = model.step(torch.rand(1, 2, EXPERTS), state)
    top = logits.topk(TOP_K, dim=-1).indices
    masked = torch.full_like(logits, -torch.inf).scatter(-1, top, logits.gather(-1, top)).softmax(-1)
    expected, _ = model.step(masked, state)
    torch.testing.assert_close(model.rollout(logits, state, 3)[0], expected)


def test_prefill_equals_observing_step_by_step() -> None:
    trace = make_trace(11)
    whole, parts = make_predictor(), make_predictor()
    at_once = whole.prefill(Trace(trace.logits[:9], trace.topk[:9], trace.tokens[:9], np.array([0, 9])))
    stepped = observe(parts, trace, range(9))
    for forecast, moment in zip(at_once, [(8, 1), (8, 2)], strict=True):
        assert forecast.first_pos == stepped[moment].first_pos
        np.testing.assert_allclose(forecast.probabilities, stepped[moment].probabilities, atol=1e-5)
    after, expected = observe(whole, trace, range(9, 11)), observe(parts, trace, range(9, 11))
    for moment, forecast in after.items():
        np.testing.assert_allclose(forecast.probabilities, expected[moment].probabilities, atol=1e-5)


def test_reset_forgets_the_document() -> None:
    trace, predictor = make_trace(4), make_predictor()
    first = observe(predictor, trace, range(4))
    predictor.reset()
    assert predictor.forecast() is None
    for moment, forecast in observe(predictor, trace, range(4)).items():
        np.testing.assert_array_equal(forecast.probabilities, first[moment].probabilities)


def test_a_prompt_of_another_model_or_of_two_documents_is_refused() -> None:
    trace, predictor = make_trace(4), make_predictor()
    with pytest.raises(ValueError, match="one document"):
        predictor.prefill(Trace(trace.logits, trace.topk, trace.tokens, np.array([0, 2, 4])))
    with pytest.raises(ValueError, match="the predictor 3 × 6"):
        predictor.prefill(Trace(trace.logits[:, :2], trace.topk[:, :2], trace.tokens, trace.bounds))


def test_models_of_different_routers_are_refused() -> None:
    models = [GroupModel(GroupShape(1, experts, TOP_K, sizes=SIZES)) for experts in (4, 5)]
    with pytest.raises(ValueError, match="give one router"):
        Mamba2Predictor(models)


def test_it_goes_on_from_states_that_it_gave() -> None:
    trace, predictor, other = make_trace(4), make_predictor(), make_predictor()
    observe(predictor, trace, range(2))
    states = predictor.states()
    expected = observe(predictor, trace, range(2, 4))
    other.restore(states)
    assert other.forecast() is None
    for at, forecast in observe(other, trace, range(2, 4)).items():
        assert np.array_equal(forecast.probabilities, expected[at].probabilities)
    other.restore(states)  # what was given is not written over
    again = observe(other, trace, range(2, 4))[2, 1]
    assert np.array_equal(again.probabilities, expected[2, 1].probabilities)
