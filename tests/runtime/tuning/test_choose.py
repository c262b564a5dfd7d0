"""Which candidate wins, what is not measured, and what is said of each."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hetero_runtime.config import Config
from hetero_runtime.config.tree import RoutingConfig
from hetero_runtime.errors import BudgetError, ConfigError, HeteroError
from hetero_runtime.tuning.base import Candidate, Measured, Measurer
from hetero_runtime.tuning.choose import choose

PLAIN, OTHER, STEERED = (
    Candidate("plain", Config()),
    Candidate("other", Config(device="cpu")),
    Candidate("steered", replace(Config(), routing=RoutingConfig(policy="psr"))),
)


class Scripted(Measurer):
    """Says `ms` by name, or raises; `kl` is 0 where nothing is given. A run takes a second of `now`."""

    def __init__(self, ms: dict[str, float | HeteroError], kl: dict[str, tuple[float, float]]) -> None:
        self._ms, self._kl = ms, kl
        self.now, self.ran = 0.0, list[str]()

    def measure(self, candidate: Candidate) -> Measured:
        self.now += 1.0
        self.ran.append(candidate.name)
        found = self._ms[candidate.name]
        if isinstance(found, HeteroError):
            raise found
        return Measured(found, *self._kl.get(candidate.name, (0.0, 0.0)), num_tokens=48)


@pytest.mark.parametrize(
    ("other_ms", "wins"), [(9.0, "other"), (9.6, "plain"), (10.0, "plain"), (20.0, "plain")]
)
def test_the_first_stays_unless_another_is_clearly_faster(other_ms: float, wins: str) -> None:
    measurer = Scripted({"plain": 10.0, "other": other_ms}, {})
    assert choose([PLAIN, OTHER], measurer, kl_budget=0).best.name == wins


@pytest.mark.parametrize(
    ("budget", "kl", "wins"),
    [(0.0, (0.001, 0.0), "plain"), (0.02, (0.01, 0.005), "steered"), (0.02, (0.016, 0.005), "plain")],
)
def test_divergence_with_its_error_has_to_be_within_the_budget(
    budget: float, kl: tuple[float, float], wins: str
) -> None:
    measurer = Scripted({"plain": 10.0, "steered": 5.0}, {"steered": kl})
    choice = choose([PLAIN, STEERED], measurer, kl_budget=budget)
    assert choice.best.name == wins
    assert ("over routing.kl_budget" in choice.lines()[1]) == (wins == "plain")


def test_a_candidate_alone_is_not_measured() -> None:
    measurer = Scripted({}, {})
    choice = choose([PLAIN], measurer, kl_budget=0)
    assert choice.best is PLAIN
    assert not measurer.ran
    assert choice.lines() == ["* plain: not measured: what is given leaves nothing to choose"]


def test_what_cannot_run_is_told_and_passed_by() -> None:
    measurer = Scripted({"plain": 10.0, "other": ConfigError("no predictor"), "steered": 5.0}, {})
    choice = choose([PLAIN, OTHER, STEERED], measurer, kl_budget=0)
    assert choice.best is STEERED
    assert choice.lines() == [
        "  plain: 10.0 ms a token over 48",
        "  other: not possible: no predictor",
        "* steered: 5.0 ms a token over 48",
    ]


def test_nothing_begins_after_the_time_but_the_first() -> None:
    measurer = Scripted({"plain": 10.0, "other": 9.9, "steered": 1.0}, {})
    choice = choose([PLAIN, OTHER, STEERED], measurer, kl_budget=0, seconds=0.5, clock=lambda: measurer.now)
    assert measurer.ran == ["plain", "other"]
    assert choice.best is PLAIN
    assert choice.lines()[2] == "  steered: not measured: 0 s are over"


def test_the_first_has_to_run() -> None:
    measurer = Scripted({"plain": BudgetError("too small"), "other": 1.0}, {})
    with pytest.raises(BudgetError, match="too small"):
        choose([PLAIN, OTHER], measurer, kl_budget=0)
