"""Algorithm 1, line by line, on caches small enough to follow by hand."""

from __future__ import annotations

import numpy as np
import pytest

from hetero_scheduler.routing import (
    Calibration,
    LogicalCache,
    Shape,
    TokenPrior,
    make_routing_policy,
    uncalibrated,
)

SHAPE = Shape(2, 6, 2)


def _cache(
    name: str, *, warm: list[int], share: dict[int, int] | None = None, **parameters: object
) -> LogicalCache:
    """Range 1 in both layers. `share`: of token 7, in 256ths."""
    uses = np.zeros((2, 6))
    uses[:, warm] = 1
    rows = np.zeros((2, 2, 6), np.uint8)
    for expert, value in (share or {}).items():
        rows[0, :, expert] = value
    calibration = Calibration(np.ones(2), uses, TokenPrior(np.array([7]), rows))
    policy = make_routing_policy(name, **parameters)
    return LogicalCache(policy, SHAPE, capacity=len(warm), calibration=calibration)


def _select(cache: LogicalCache, z: list[float], token: int = 0, layer: int = 1) -> list[int]:
    scores = np.array([[z]], np.float32)
    own = np.argsort(-scores, axis=-1, kind="stable")[..., :2]
    return cache.select(scores, own, np.array([token]), first_layer=layer).experts[0, 0].tolist()


def _steer(cache: LogicalCache, g: list[float], token: int = 0) -> list[int]:
    return cache.steer(1, np.array(g, np.float32), token).tolist()


def test_a_resident_expert_gains_the_bonus() -> None:
    cache = _cache("cache_prior", warm=[0, 1, 2], bonus=0.5)
    assert _select(cache, [0.0, 0.6, 0.0, 0.8, 1.0, 0.0]) == [4, 1]


def test_protected_experts_gain_it_too() -> None:
    cache = _cache("cache_prior", warm=[0, 1, 2], bonus=0.5, protected=2)
    assert _select(cache, [0.0, 0.6, 0.0, 0.8, 1.0, 0.0]) == [4, 3]


def test_insertion_evicts_the_least_and_steers() -> None:
    cache = _cache("psr", warm=[0, 1, 2], bonus=0.5, share={0: 9, 1: 5, 2: 7})
    assert _steer(cache, [0, 0, 0, 0, 0, 1], token=7) == [5]
    assert cache.residents(1).tolist() == [0, 2, 5]
    assert _select(cache, [1.0, 0.0, 0.0, 0.9, 0.0, 0.5], token=7) == [0, 5]


def test_at_most_n_are_inserted_of_the_window() -> None:
    g = [0.0, 0.1, 0.2, 0.6, 0.5, 0.4]
    assert _steer(_cache("psr", warm=[0, 1, 2], insertions=1, window=3), g) == [3]
    assert _steer(_cache("psr", warm=[0, 1, 2], insertions=2, window=3), g) == [3, 4]
    assert _steer(_cache("psr", warm=[0, 1, 2], insertions=3, window=2), g) == [3, 4]


def test_a_visited_candidate_is_protected_and_one_to_come_is_not() -> None:
    cache = _cache("psr", warm=[0, 1, 2], share={1: 1, 2: 2}, window=3)
    assert _steer(cache, [1.0, 0.5, 0, 0.8, 0, 0], token=7) == [3], "0 was visited, 1 comes after 3"
    assert cache.residents(1).tolist() == [0, 2, 3]


def test_nothing_is_inserted_where_all_are_protected() -> None:
    cache = _cache("psr", warm=[0, 1], window=3)
    assert _steer(cache, [1.0, 0.9, 0.8, 0, 0, 0]) == []


def test_a_demand_spares_what_the_pregate_visited_while_it_can() -> None:
    cache = _cache("psr", warm=[0, 1, 2], bonus=0.0, share={1: 1, 2: 2}, window=1)
    _steer(cache, [1.0, 0, 0, 0, 0, 0], token=7)
    assert _select(cache, [0, 0, 0, 1.0, 0.9, 0], token=7) == [3, 4]
    assert cache.residents(1).tolist() == [0, 3, 4], "1 and 2 left before 0, which scores least"


def test_a_demand_takes_it_where_nothing_else_is_left() -> None:
    cache = _cache("psr", warm=[0, 1], bonus=0.0, window=2)
    _steer(cache, [1.0, 0.9, 0, 0, 0, 0])
    assert _select(cache, [0, 0, 0, 1.0, 0.9, 0]) == [3, 4]
    assert cache.residents(1).tolist() == [3, 4]


def test_averages_follow_the_router_not_what_was_executed() -> None:
    cache = _cache("psr", warm=[0, 1], bonus=10.0, insertions=0)
    assert _select(cache, [0.1, 0.0, 0.0, 1.0, 0.9, 0.0]) == [0, 1]
    assert _select(cache, [0.0, 0.0, 0.0, 1.0, 0.9, 0.0]) == [0, 1]
    np.testing.assert_allclose(cache.priority(1), [0, 0, 0, 0.52, 0.52, 0], atol=1e-6)


def test_the_first_layer_follows_its_router_and_others_the_guess() -> None:
    cache = _cache("speculative_experts", warm=[0, 1, 2])
    assert _select(cache, [0, 0, 0, 1.0, 0.9, 0], layer=0) == [3, 4]
    _steer(cache, [0, 0, 0, 0, 0.8, 0.9])
    assert _select(cache, [0, 0, 0, 1.0, 0.9, 0]) == [4, 5], "4 is the router's own: it stays in front"


@pytest.mark.parametrize(
    ("name", "parameters", "words"),
    [
        ("psr", {"bonus": -1.0}, "bonus is -1.0"),
        ("psr", {"window": 0}, "window 0"),
        ("cache_prior", {"protected": -1}, "protected is -1"),
        ("cache_prior", {"range": "none"}, "known: fixed, running"),
        ("exact", {"priority": "lfu"}, "known: lru, a"),
        ("nobody", {}, "known: exact"),
    ],
)
def test_a_bad_policy_is_refused(name: str, parameters: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make_routing_policy(name, **parameters)


def test_a_cache_that_cannot_run_a_layer_is_refused() -> None:
    with pytest.raises(ValueError, match=r"give 2 \(the top-k\) to 6"):
        LogicalCache(make_routing_policy("psr"), SHAPE, capacity=1, calibration=uncalibrated(SHAPE))
    other = uncalibrated(Shape(2, 7, 2))
    with pytest.raises(ValueError, match="the calibration is of"):
        LogicalCache(make_routing_policy("psr"), SHAPE, capacity=2, calibration=other)


def test_unknown_tokens_have_no_prior() -> None:
    share = np.array([[[1, 2]], [[3, 4]], [[0, 0]]], np.uint8)
    prior = TokenPrior(np.array([5, 9]), share)
    assert prior.rows(np.array([4, 5, 6, 9, 10])).tolist() == [2, 0, 2, 1, 2]
    assert [prior.row(token) for token in (4, 5, 6, 9, 10)] == [2, 0, 2, 1, 2]
    with pytest.raises(ValueError, match="a row for each"):
        TokenPrior(np.array([5]), share)
