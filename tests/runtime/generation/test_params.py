"""Sampling settings: what is refused, and what the message says."""

from __future__ import annotations

import math
from typing import Any

import pytest

from hetero_runtime.errors import RequestError
from hetero_runtime.generation.params import SamplingParams


def test_defaults_are_greedy() -> None:
    params = SamplingParams()
    assert params.is_greedy
    assert params.max_tokens == 256
    assert params.stop == ()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", 1.5),
        ("max_tokens", True),
        ("temperature", -0.1),
        ("temperature", 1e-9),
        ("temperature", math.nan),
        ("temperature", "hot"),
        ("top_p", 0),
        ("top_p", 1.01),
        ("top_k", -1),
        ("top_k", 2.0),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("repetition_penalty", 0),
        ("repetition_penalty", math.inf),
        ("seed", 2**63),
        ("seed", "7"),
        ("stop", "END"),
        ("stop", ("",)),
        ("stop", (3,)),
        ("ignore_eos", 1),
    ],
)
def test_bad_value_names_field_value_and_range(field: str, value: Any) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{field: value})
    message = str(caught.value)
    assert f"sampling parameter {field} is {value!r}; allowed: " in message


def test_lone_stop_string_is_told_the_fix() -> None:
    with pytest.raises(RequestError, match=r"here \('END',\)"):
        SamplingParams(stop="END")  # type: ignore[arg-type]


def test_integers_and_lists_are_taken_as_meant() -> None:
    params = SamplingParams(temperature=1, top_p=1, stop=["a", "b"])  # type: ignore[arg-type]
    assert isinstance(params.temperature, float)
    assert params.stop == ("a", "b")
    assert params == SamplingParams(temperature=1.0, stop=("a", "b"))


@pytest.mark.parametrize("seed", [None, 0, -1, 2**63 - 1, -(2**63)])
def test_seed_limits(seed: int | None) -> None:
    assert SamplingParams(seed=seed).seed == seed
