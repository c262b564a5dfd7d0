"""What a trace refuses, and its load entropy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hetero_scheduler.trace import Trace


def parts(**changes: Any) -> dict[str, Any]:
    whole = {
        "logits": np.zeros((4, 2, 8), dtype=np.float16),
        "topk": np.arange(16).reshape(4, 2, 2) % 8,
        "tokens": np.arange(4, dtype=np.int32),
        "bounds": np.array([0, 3, 4]),
    }
    return whole | changes


def test_sizes() -> None:
    trace = Trace(**parts())
    assert (trace.num_tokens, trace.num_layers, trace.num_experts, trace.top_k) == (4, 2, 8, 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"topk": np.zeros((3, 2, 2), dtype=int)}, "disagree"),
        ({"tokens": np.zeros(5, dtype=np.int32)}, "disagree"),
        ({"topk": np.full((4, 2, 2), 8)}, "outside 0 to 7"),
        ({"bounds": np.array([0, 3])}, "do not divide 4"),
        ({"bounds": np.array([0, 2, 2, 4])}, "do not divide 4"),
    ],
)
def test_parts_that_do_not_fit_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Trace(**parts(**changes))


def test_load_entropy_is_one_for_an_even_load_and_less_otherwise() -> None:
    even = np.tile(np.arange(8).reshape(4, 1, 2), (1, 2, 1))
    assert Trace(**parts(topk=even)).load_entropy() == pytest.approx(1.0)
    skewed = np.zeros((4, 2, 2), dtype=int)
    assert Trace(**parts(topk=skewed)).load_entropy() == pytest.approx(0.0)
