"""Repetitions first, another drafter where there are none, and that one rests after failures."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest

from hetero_runtime.generation import SamplingParams
from hetero_runtime.speculation.base import Draft, Drafter, DraftRow
from hetero_runtime.speculation.repeats_first import RepeatsFirst

NEW = list(range(100, 120))
OTHER = (7, 7, 7)


class Noting(Drafter, DraftRow):
    """Drafts always the same, and writes down what happens to it."""

    def __init__(self) -> None:
        self.said: list[str] = []

    @contextmanager
    def open(self, params: SamplingParams, checkpoint: Callable[[], None]) -> Iterator[DraftRow]:
        yield self

    def draft(self, history: Sequence[int], count: int) -> Draft:
        self.said.append("draft")
        return Draft(OTHER[:count])

    @contextmanager
    def listening(self) -> Iterator[None]:
        self.said.append("listen")
        yield

    def keep(self, count: int) -> None:
        self.said.append(f"keep {count}")

    def close(self) -> None:
        self.said.append("close")


@pytest.fixture
def other() -> Noting:
    return Noting()


@pytest.fixture
def row(other: Noting) -> Iterator[DraftRow]:
    with RepeatsFirst(other).open(SamplingParams(), lambda: None) as row:
        yield row


def test_a_long_repetition_is_believed(row: DraftRow, other: Noting) -> None:
    assert row.draft([1, 2, 3, 4, 5, 6, 9, 1, 2, 3, 4, 5], 8).token_ids[:2] == (6, 9)
    assert not other.said


def test_new_text_is_for_the_other_drafter(row: DraftRow, other: Noting) -> None:
    assert row.draft(NEW, 8).token_ids == OTHER
    assert other.said == ["draft"]


def test_a_short_repetition_is_better_than_less(row: DraftRow, other: Noting) -> None:
    history = [1, 2, 5, 6, 9, 1, 2]
    assert row.draft(history, 8).token_ids == OTHER  # longer than the two tokens that were alike
    other.draft = lambda history, count: Draft(())  # type: ignore[method-assign]
    assert row.draft(history, 8).token_ids == (5, 6)


def test_what_is_heard_and_kept_reaches_the_other_always(row: DraftRow, other: Noting) -> None:
    with row.listening():
        pass
    row.keep(5)
    row.draft([1, 2, 3, 4, 5, 1, 2, 3, 4], 3)
    row.keep(2)
    assert other.said == ["listen", "keep 5", "keep 2"]


@pytest.mark.parametrize("kept", [1, 2])
def test_drafts_that_do_not_pay_make_it_rest_longer_and_longer(
    row: DraftRow, other: Noting, kept: int
) -> None:
    row.keep(4)  # the prompt
    asked = []
    for _ in range(90):
        before = other.said.count("draft")
        row.draft(NEW, 3)
        asked.append(other.said.count("draft") > before)
        row.keep(kept)  # none of its tokens, or one
    assert [step for step, was_asked in enumerate(asked) if was_asked] == [0, 2, 5, 10, 19, 36, 69]
    while other.said[-1] != "draft":
        row.draft(NEW, 3)
    row.keep(3)  # two of its tokens were right
    row.draft(NEW, 3)
    assert other.said[-1] == "draft"


def test_memory_is_given_back(other: Noting) -> None:
    RepeatsFirst(other).close()
    assert other.said == ["close"]
