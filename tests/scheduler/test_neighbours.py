"""Experts that are chosen together lie next to each other."""

from __future__ import annotations

import numpy as np
import pytest

from hetero_scheduler.neighbours import order_by_company
from hetero_scheduler.trace import Trace


def trace_of(topk: np.ndarray, num_experts: int) -> Trace:
    num_tokens, num_layers, _ = topk.shape
    return Trace(
        logits=np.zeros((num_tokens, num_layers, num_experts), dtype=np.float16),
        topk=topk,
        tokens=np.zeros(num_tokens, dtype=np.int32),
        bounds=np.array([0, num_tokens]),
    )


@pytest.mark.parametrize(("num_experts", "top_k"), [(1, 1), (7, 2), (64, 8), (33, 1)])
def test_every_expert_once_in_every_layer(num_experts: int, top_k: int) -> None:
    topk = np.random.default_rng(0).random((50, 3, num_experts)).argsort(axis=2)[..., :top_k]
    order = order_by_company(trace_of(topk, num_experts))
    assert np.array_equal(np.sort(order, axis=1), np.tile(np.arange(num_experts), (3, 1)))


def test_groups_are_kept_together() -> None:
    """Experts 3 g, 3 g + 1 and 3 g + 2 of 24 are always chosen together; what a number means is shuffled."""
    rng = np.random.default_rng(1)
    names = rng.permutation(24)
    groups = rng.integers(0, 8, 20_000)
    topk = names[groups[:, None] * 3 + np.arange(3)][:, None]
    order = order_by_company(trace_of(topk, 24))[0]
    places = np.argsort(names)[order] // 3  # the group of each expert in the chain
    assert np.array_equal(places, np.repeat(places[::3], 3))


def test_ties_go_to_the_expert_that_was_used_more_and_then_to_the_lower() -> None:
    topk = np.array([[[4]], [[4]], [[2]], [[2]], [[1]]])
    assert order_by_company(trace_of(topk, 5))[0].tolist() == [2, 4, 1, 0, 3]
