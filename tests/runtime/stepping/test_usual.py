"""Which steps the orchestrator hears of: those that compare."""

from __future__ import annotations

import pytest

from hetero_runtime.stepping.usual import LATE, UsualSteps
from tests.runtime.stepping.idle import IdleOrchestrator


class Hearing(IdleOrchestrator):
    """Remembers what it is told."""

    def __init__(self) -> None:
        self.heard: list[int] = []

    def observe_steps(self, num_steps: int, seconds: float) -> None:
        assert num_steps == 4
        self.heard.append(int(seconds))


def heard_of(rows: list[int]) -> list[int]:
    """Which of the observations, of steps with so many rows each, the orchestrator hears of."""
    orchestrator = Hearing()
    usual = UsualSteps(orchestrator)
    for number, tokens in enumerate(rows):
        usual.observe(4, float(number), tokens_a_step=tokens)
    return orchestrator.heard


@pytest.mark.parametrize("rows", [1, 3])
def test_steps_that_are_all_alike_are_all_heard_of(rows: int) -> None:
    assert heard_of([rows] * 100) == [*range(100)]


def test_what_differs_now_and_then_does_not_compare() -> None:
    assert heard_of([2, 2, 2, 1, 2, 4, 2, 1]) == [0, 1, 2, 4, 6]


def test_what_is_usual_changes_once_most_of_late_are_different() -> None:
    """One row is served for a while, then two are."""
    heard = heard_of([1] * 40 + [2] * 80 + [1])
    first = next(number for number in heard if number >= 40)
    assert heard == [*range(40), *range(first, 120)]
    assert 40 + LATE // 4 < first <= 40 + LATE // 2
