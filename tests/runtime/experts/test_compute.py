"""Which rows go to which expert: transformers' own order."""

from __future__ import annotations

import numpy as np
import pytest

from hetero_runtime.experts.compute import Dispatch


@pytest.mark.parametrize("tokens", [0, 1, 37, 1296])
@pytest.mark.parametrize("num_experts", [4, 300])
def test_rows_come_by_expert_and_then_by_place_in_the_transposed_routing(
    tokens: int, num_experts: int
) -> None:
    chosen = np.argsort(np.random.default_rng(tokens).random((tokens, num_experts)), axis=1)[:, :3]
    dispatch, flat = Dispatch.of(chosen), chosen.T.reshape(-1)
    assert np.array_equal(dispatch.experts, np.unique(flat))
    for i, expert in enumerate(dispatch.experts):
        rows = dispatch.order[dispatch.bounds[i] : dispatch.bounds[i + 1]]
        assert np.array_equal(rows, np.flatnonzero(flat == expert))
    assert np.array_equal(dispatch.tokens_per_expert(num_experts), np.bincount(flat, minlength=num_experts))
