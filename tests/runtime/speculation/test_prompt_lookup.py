"""What followed the last tokens when they came before."""

from __future__ import annotations

import random

import pytest

from hetero_runtime.generation import SamplingParams
from hetero_runtime.speculation.base import Draft
from hetero_runtime.speculation.prompt_lookup import PromptLookup


def draft(*histories: list[int], count: int = 15) -> Draft:
    """The draft after the last of `histories`, each of which goes on from the one before."""
    with PromptLookup().open(SamplingParams(), lambda: None) as row:
        return [row.draft(history, count) for history in histories][-1]


@pytest.mark.parametrize(
    ("history", "expected"),
    [
        pytest.param([], (), id="nothing"),
        pytest.param([1, 2], (), id="nothing before"),
        pytest.param([1, 2, 3, 9, 3], (), id="one token alike is too little"),
        pytest.param([1, 2, 3, 4, 9, 1, 2], (3, 4), id="two alike, two drafted"),
        pytest.param([1, 2, 3, 4, 5, 9, 1, 2, 3], (4, 5, 9), id="three alike, three drafted"),
        pytest.param([1, 2, 7, 8, 1, 2, 5, 6, 1, 2], (5, 6), id="the latest place wins"),
        pytest.param([4, 1, 2, 7, 9, 1, 2, 5, 4, 1, 2], (7, 9, 1), id="the longer run wins"),
        pytest.param([5, 5, 5, 5], (5, 5, 5), id="one token over and over"),
        pytest.param([1, 2, 3] * 4, (1, 2, 3) * 3, id="past the end it repeats itself"),
    ],
)
def test_drafts(history: list[int], expected: tuple[int, ...]) -> None:
    assert draft(history).token_ids == expected
    assert draft(history).probabilities is None


def test_count_is_the_most() -> None:
    assert draft([1, 2, 3] * 9, count=4).token_ids == (1, 2, 3, 1)
    assert draft([1, 2, 3] * 9, count=0).token_ids == ()


def test_a_growing_text_is_known_as_well_as_a_whole_one() -> None:
    tokens = random.Random(0).choices(range(3), k=200)
    steps = [tokens[:end] for end in (10, 11, 12, 40, 41, 199, 200)]
    assert draft(*steps) == draft(tokens)


def test_texts_know_nothing_of_each_other() -> None:
    drafter = PromptLookup()
    with (
        drafter.open(SamplingParams(), lambda: None) as one,
        drafter.open(SamplingParams(), lambda: None) as other,
    ):
        assert one.draft([1, 2, 3, 9, 1, 2], 4).token_ids == (3, 9)
        assert other.draft([8, 1, 2], 4).token_ids == ()
