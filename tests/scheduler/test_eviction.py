"""Eviction scores against the obvious reading of their definitions."""

from __future__ import annotations

import math

import numpy as np
import pytest

from hetero_scheduler import EVICTION_POLICIES, Popularity, make_eviction

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


def test_popularity_ranks_by_tokens_then_by_index() -> None:
    popularity = Popularity(1, 4)
    popularity.observe(0, np.array([0, 2, 5, 2]))
    assert popularity.ranking(0).tolist() == [2, 1, 3, 0]
