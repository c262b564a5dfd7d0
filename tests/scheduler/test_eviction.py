"""Eviction scores against the obvious reading of their definitions."""

from __future__ import annotations

import math

import numpy as np
import pytest

from hetero_scheduler import EVICTION_POLICIES, Popularity, make_eviction
from hetero_scheduler.popularity import PROFILE_TOKENS

NUM_LAYERS, NUM_EXPERTS = 3, 8


def history(num_passes: int = 40) -> list[list[np.ndarray]]:
    """Tokens per expert by pass and layer; skewed, so that policies differ."""
    rng = np.random.default_rng(7)
    weights = 1.0 / np.arange(1, NUM_EXPERTS + 1)
    return [
        [rng.multinomial(3, weights / weights.sum()) for _ in range(NUM_LAYERS)] for _ in range(num_passes)
    ]


@pytest.mark.parametrize("name", EVICTION_POLICIES)
def test_scores_order_experts_as_the_definition_says(name: str) -> None:
    policy = make_eviction(name, num_layers=NUM_LAYERS, num_experts=NUM_EXPERTS)  # type: ignore[arg-type]
    passes = history()
    for one in passes:
        for layer, tokens in enumerate(one):
            policy.observe(layer, tokens)
    for layer in range(NUM_LAYERS):
        uses = [[i for i, one in enumerate(passes) if one[layer][e]] for e in range(NUM_EXPERTS)]
        expected = [_by_definition(name, used, now=len(passes) - 1) for used in uses]
        got = policy.score[layer]
        for a in range(NUM_EXPERTS):
            for b in range(NUM_EXPERTS):
                if expected[a] < expected[b] - 1e-12:
                    assert got[a] < got[b], (name, layer, a, b)


def _by_definition(name: str, used: list[int], *, now: int) -> float:
    if name == "lru":
        return max(used, default=-1)
    if name == "lfu":
        return len(used)
    return math.fsum(2.0 ** (-(now - i) / 16) for i in used)


def test_lru_compares_between_layers() -> None:
    policy = make_eviction("lru", num_layers=2, num_experts=2)
    policy.observe(0, np.array([1, 0]))
    policy.observe(1, np.array([0, 1]))
    assert policy.score[1, 1] > policy.score[0, 0] > policy.score[0, 1]


def test_lfru_forgets_and_does_not_overflow() -> None:
    policy = make_eviction("lfru", num_layers=1, num_experts=2)
    for _ in range(50):
        policy.observe(0, np.array([1, 0]))
    for _ in range(100_000):
        policy.observe(0, np.array([0, 1]))
    assert np.isfinite(policy.score).all()
    assert policy.score[0, 1] > policy.score[0, 0]


def test_unknown_policy_is_refused_with_what_is_known() -> None:
    with pytest.raises(ValueError, match="lru, lfu, lfru"):
        make_eviction("mru", num_layers=1, num_experts=1)  # type: ignore[arg-type]


def test_a_profile_is_a_beginning_of_the_counts_whatever_its_unit() -> None:
    uses = np.array([[1.0, 3.0, 0.0, 0.0]])
    few, many = (Popularity.profiled(unit * uses, top_k=2) for unit in (1e-6, 1e6))
    np.testing.assert_allclose(few.counts, many.counts)
    assert few.counts.sum() == 2 * PROFILE_TOKENS
    few.observe(0, np.array([0, 0, 0, 4 * PROFILE_TOKENS]))
    assert few.counts.argmax() == 3


def test_a_profile_that_never_saw_a_layer_is_refused() -> None:
    with pytest.raises(ValueError, match="layer 1 of the profile has no uses"):
        Popularity.profiled(np.array([[1.0, 1.0], [0.0, 0.0]]), top_k=1)
