"""Coefficients follow what they move, within bounds, and come to rest."""

from __future__ import annotations

import math

import pytest
import torch

from bench.traces.look import Look
from bench.traces.objective import Coefficients, Wants
from bench.traces.steering import MAX_STEP, Steering

CPU = torch.device("cpu")


def look(**found: object) -> Look:
    values = {"loss": 3.0, "entropy": 0.97, "persistence": 0.3, "lru": (74.0, 88.0), "foreseen": None}
    return Look(**{**values, **found})  # type: ignore[arg-type]


def test_rises_when_too_little_and_falls_when_too_much() -> None:
    steering = Steering(wanted=0.9, coefficient=0.1, gain=2.0)
    assert steering.update(0.8) == pytest.approx(0.1 * math.exp(0.2))
    assert steering.update(1.0) == pytest.approx(0.1)


def test_rests_within_its_slack_and_counts_only_what_is_beyond() -> None:
    steering = Steering(wanted=0.9, coefficient=0.1, gain=2.0, slack=0.05)
    assert steering.update(0.86) == 0.1
    assert steering.update(0.80) == pytest.approx(0.1 * math.exp(2 * 0.05))


def test_one_look_moves_it_little_and_bounds_hold() -> None:
    steering = Steering(wanted=100.0, coefficient=0.1, gain=5.0, least=0.05, most=0.15)
    assert steering.update(0.0) == pytest.approx(min(0.15, 0.1 * math.exp(MAX_STEP)))
    for _ in range(5):
        steering.update(200.0)
    assert steering.coefficient == 0.05


def test_a_start_outside_its_bounds_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot be"):
        Steering(wanted=1.0, coefficient=2.0, gain=1.0)


@pytest.mark.parametrize("lag", [0.3, 0.8], ids=["quick to follow", "slow to follow"])
def test_settles_on_a_measure_that_follows_late(lag: float) -> None:
    """The measure drifts towards 30 · log10(coefficient) + 150, as routing drifts under its loss."""
    steering = Steering(wanted=74.0, coefficient=1e-4, gain=0.02, slack=0.5)
    measured = 20.0
    for _ in range(200):
        target = 30 * math.log10(steering.coefficient) + 150
        measured = lag * measured + (1 - lag) * target
        steering.update(measured)
    assert measured == pytest.approx(74.0, abs=1.0)


def test_natural_routing_has_its_balance_alone() -> None:
    coefficients = Coefficients(Wants(), CPU)
    coefficients.follow(look(entropy=0.90))
    assert set(coefficients.values) == {"balance"}
    assert coefficients.values["balance"] > 0.02


def test_each_coefficient_follows_its_own_measure() -> None:
    coefficients = Coefficients(Wants(entropy=0.97, lru=(74.0, 88.0), foreseen=0.9), CPU)
    before = coefficients.state()
    coefficients.follow(look(lru=(84.0, 93.0), foreseen=0.5))
    after = coefficients.state()
    assert after["balance"] == before["balance"]
    assert after["consistency"] < before["consistency"]
    assert after["departure"] > before["departure"]
    assert after["novelty"] > before["novelty"]
    assert after["foresight"] > before["foresight"]
    for name, value in coefficients.values.items():
        assert value == pytest.approx(after[name])


def test_coefficients_go_on_from_a_checkpoint_that_lacks_some() -> None:
    natural, matched = Coefficients(Wants(), CPU), Coefficients(Wants(lru=(74.0, 88.0)), CPU)
    natural.follow(look(entropy=0.8))
    fresh = matched.state()
    matched.load(natural.state())
    assert matched.state() == {**fresh, "balance": natural.state()["balance"]}
