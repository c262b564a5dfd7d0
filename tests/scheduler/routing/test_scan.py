"""The compiled step decides like Algorithm 1 in plain Python, and the same however it is called."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_scheduler.routing import LogicalCache, RoutingPolicy, Shape, make_routing_policy
from tests.scheduler.routing.texts import (
    POLICIES,
    Text,
    in_one_scan,
    in_plain_python,
    make_cache,
    make_calibration,
    make_text,
)

by_policy = pytest.mark.parametrize("policy", POLICIES, ids=repr)
SHAPE = Shape(3, 12, 3)


@by_policy
@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    capacity=st.integers(3, 12),
    num_values=st.sampled_from([0, 2, 5]),
    num_groups=st.sampled_from([1, 2, 4]),
)
def test_scan_decides_like_the_reference(
    policy: RoutingPolicy, seed: int, capacity: int, num_values: int, num_groups: int
) -> None:
    text = make_text(SHAPE, num_tokens=30, seed=seed, num_values=num_values, num_groups=num_groups)
    cache = make_cache(policy, SHAPE, capacity=capacity, seed=seed)
    expected, layers = in_plain_python(policy, SHAPE, text, capacity=capacity, seed=seed)
    np.testing.assert_array_equal(np.sort(in_one_scan(cache, text), axis=-1), expected)
    assert [set(cache.residents(layer)) for layer in range(3)] == [each.resident for each in layers]


@by_policy
@pytest.mark.parametrize(
    "shape", [Shape(2, 1, 1), Shape(2, 63, 8), Shape(2, 64, 6), Shape(1, 256, 8)], ids=str
)
def test_scan_decides_like_the_reference_at_real_sizes(policy: RoutingPolicy, shape: Shape) -> None:
    text = make_text(shape, num_tokens=60, seed=1)
    capacity = min(shape.num_experts, 2 * shape.top_k)
    policy = (
        policy if policy.rules.protected <= shape.top_k else make_routing_policy("cache_prior", protected=1)
    )
    expected, _ = in_plain_python(policy, shape, text, capacity=capacity)
    cache = make_cache(policy, shape, capacity=capacity)
    np.testing.assert_array_equal(np.sort(in_one_scan(cache, text), axis=-1), expected)


@by_policy
def test_layer_by_layer_and_token_by_token_decide_alike(policy: RoutingPolicy) -> None:
    """A prompt's pass, whose layer l waits for layer l - 1 of all tokens; and decode's, steered ahead."""
    text = make_text(SHAPE, num_tokens=40, seed=2, num_values=6)
    at_once = in_one_scan(make_cache(policy, SHAPE, capacity=5), text)

    def of_layer(layer: int, part: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(part[:, layer : layer + 1])

    prompt, decode = make_cache(policy, SHAPE, capacity=5), make_cache(policy, SHAPE, capacity=5)
    by_layer = np.concatenate(
        [
            prompt.select(
                of_layer(layer, text.z),
                of_layer(layer, text.own),
                text.tokens,
                first_layer=layer,
                guesses=of_layer(layer, text.g) if layer else None,
            ).experts
            for layer in range(SHAPE.num_layers)
        ],
        axis=1,
    )
    np.testing.assert_array_equal(by_layer, at_once)
    by_token = np.stack([_steered(decode, text, t) for t in range(40)])
    np.testing.assert_array_equal(by_token, at_once)
    for layer in range(SHAPE.num_layers):
        np.testing.assert_array_equal(prompt.residents(layer), decode.residents(layer))


def _steered(cache: LogicalCache, text: Text, t: int) -> np.ndarray:
    """One token, each layer steered while the layer before it runs. `[L, K]`"""
    token, chosen = text.tokens[t : t + 1], []
    for layer in range(SHAPE.num_layers):
        z, own = text.z[t : t + 1, layer : layer + 1], text.own[t : t + 1, layer : layer + 1]
        decided = cache.select(z, own, token, first_layer=layer)
        chosen.append(decided.experts[0, 0])
        if cache.policy.looks_ahead and layer + 1 < SHAPE.num_layers:
            inserted = cache.steer(layer + 1, text.g[t, layer + 1], int(token[0]))
            assert set(inserted) <= set(cache.residents(layer + 1))
    return np.stack(chosen)


@pytest.mark.parametrize("priority", ["lru", "a"])
@pytest.mark.parametrize("name", ["cache_prior", "psr"])
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), num_values=st.sampled_from([0, 3]))
def test_without_a_bonus_routing_is_exact(name: str, priority: str, seed: int, num_values: int) -> None:
    """In the router's own order too, so that sums of weights round alike."""
    text = make_text(SHAPE, num_tokens=30, seed=seed, num_values=num_values)
    cache = make_cache(make_routing_policy(name, bonus=0.0, priority=priority), SHAPE, capacity=4)
    np.testing.assert_array_equal(in_one_scan(cache, text), text.own)


@by_policy
def test_with_everything_resident_only_guesses_deviate(policy: RoutingPolicy) -> None:
    text = make_text(SHAPE, num_tokens=30, seed=3)
    decided = make_cache(policy, SHAPE, capacity=SHAPE.num_experts).select(
        text.z, text.own, text.tokens, first_layer=0, guesses=text.g
    )
    assert decided.demanded.sum() == decided.inserted.sum() == 0
    assert (decided.deviating.sum() > 0) == policy.rules.executes_guess


@pytest.mark.parametrize("bonus", [0.1, 0.3])
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), capacity=st.integers(3, 12), num_values=st.sampled_from([0, 4]))
def test_lru_without_prefetch_is_cache_prior(bonus: float, seed: int, capacity: int, num_values: int) -> None:
    """Against Skliar et al.'s algorithm over an ordered dictionary, written without anything of ours."""
    text = make_text(SHAPE, num_tokens=40, seed=seed, num_values=num_values)
    cache = make_cache(
        make_routing_policy("psr", bonus=bonus, insertions=0, priority="lru"), SHAPE, capacity=capacity
    )
    found = np.sort(in_one_scan(cache, text), axis=-1)
    calibration = make_calibration(SHAPE, seed=0)
    for layer in range(SHAPE.num_layers):
        gain = np.float32(bonus * calibration.score_range[layer])
        held = OrderedDict.fromkeys(np.flatnonzero(calibration.warm_set(capacity)[layer]).tolist())
        for t in range(40):
            z, own = text.z[t, layer], text.own[t, layer].tolist()
            biased = [z[e] + gain if e in held else z[e] for e in range(12)]
            ranking = sorted(
                range(12), key=lambda e: (-biased[e], -z[e], own.index(e) if e in own else 12, e)
            )
            chosen = sorted(ranking[:3])
            for e in chosen:
                if e not in held:
                    del held[next(each for each in held if each not in chosen)]
                held[e] = None
                held.move_to_end(e)
            assert found[t, layer].tolist() == chosen


@by_policy
def test_counts_say_what_was_done(policy: RoutingPolicy) -> None:
    text = make_text(SHAPE, num_tokens=50, seed=4)
    decided = make_cache(policy, SHAPE, capacity=5).select(
        text.z, text.own, text.tokens, first_layer=0, guesses=text.g
    )
    is_foreign = (decided.experts[..., None] != text.own[:, :, None, :]).all(axis=-1)
    np.testing.assert_array_equal(decided.deviating, is_foreign.sum(axis=-1))
    assert decided.inserted.max() <= policy.rules.insertions
    assert not decided.inserted[:, 0].any(), "nothing foresees the first layer"
    assert (decided.demanded <= SHAPE.top_k).all()
    assert decided.demanded.sum() > 0


def test_a_request_begins_like_every_other() -> None:
    text = make_text(SHAPE, num_tokens=30, seed=5)
    cache = make_cache(POLICIES[4], SHAPE, capacity=5)
    first = in_one_scan(cache, text)
    assert (in_one_scan(cache, text) != first).any(), "the cache remembers nothing"
    cache.reset()
    np.testing.assert_array_equal(in_one_scan(cache, text), first)
