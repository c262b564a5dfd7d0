"""Which tokens of which rows are asked for, on a tokenizer of one letter a token."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hetero_runtime.errors import RequestError
from hetero_runtime.evaluation import RowScore
from hetero_runtime.evaluation.tasks.spans import Span, SpanReader, begin_token

BEGIN = 1


class Letters:
    """One token a letter; ` a` is one token too, as in real vocabularies. Adds a beginning where asked to."""

    def __init__(self, *, adds_begin: bool = False) -> None:
        self.bos_token_id, self.eos_token_id, self._adds_begin = BEGIN, 2, adds_begin

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        ids, i = [BEGIN] if self._adds_begin and add_special_tokens else [], 0
        while i < len(text):
            width = 2 if text[i] == " " and i + 1 < len(text) else 1
            ids.append(1000 * (width == 2) + ord(text[i + width - 1]))
            i += width
        return {"input_ids": ids}


def reader(max_length: int = 16, **tokenizer: Any) -> SpanReader:
    return SpanReader(Letters(**tokenizer), begin_token=BEGIN, max_length=max_length)


def test_a_pair_is_tokenised_as_one_text() -> None:
    assert reader().pair("ab", " cd") == Span((97, 98, 1099, 100), 2)


def test_a_blank_at_the_end_of_the_context_belongs_to_the_continuation() -> None:
    assert reader().pair("ab ", "cd") == reader().pair("ab", " cd")


@pytest.mark.parametrize("context", ["", " "])
def test_the_beginning_stands_for_an_empty_context(context: str) -> None:
    assert reader().pair(context, "cd").row[0] == BEGIN
    assert reader().pair(context, "cd").begin == 1


def test_a_tokenizer_that_adds_the_beginning_gets_no_second_one() -> None:
    assert reader(adds_begin=True).pair("ab", "c") == Span((BEGIN, 97, 98, 99), 3)
    assert reader(adds_begin=True).pair("", "c") == Span((BEGIN, 99), 1)


def test_a_long_context_loses_its_beginning() -> None:
    assert reader(4).pair("abcdef", "gh") == Span((101, 102, 103, 104), 2)


@pytest.mark.parametrize(
    ("continuation", "said"), [("", "has no tokens"), ("abcd", "has 4 tokens, and a row holds 4")]
)
def test_a_continuation_of_nothing_and_one_that_does_not_fit_are_refused(
    continuation: str, said: str
) -> None:
    with pytest.raises(RequestError, match=said):
        reader(4).pair("z", continuation)


@pytest.mark.parametrize("length", range(1, 12))
def test_windows_predict_every_token_once_with_the_most_context(length: int) -> None:
    text = "abcdefghijk"[:length]
    spans = reader(5).windows(text)
    predicted = [token for span in spans for token in span.row[span.begin :]]
    assert predicted == [ord(letter) for letter in text]
    assert spans[0].row[0] == BEGIN
    assert all(len(span.row) == min(5, length + 1) for span in spans)


def test_a_text_of_nothing_is_refused() -> None:
    with pytest.raises(RequestError, match="has no tokens"):
        reader().windows("")


def test_a_prompt_leaves_room_for_the_answer() -> None:
    assert reader(6).prompt("abcdef", 2) == [99, 100, 101, 102]
    assert reader(6).prompt("", 2) == [BEGIN]
    with pytest.raises(RequestError, match="max_gen_toks is 6"):
        reader(6).prompt("abc", 6)


def test_a_span_takes_its_part_of_the_score() -> None:
    score = RowScore(np.array([0.5, 1.0, 2.0]), np.array([False, True, True]))
    assert Span((1, 2, 3, 4), 2).log_likelihood(score) == -3.0
    assert Span((1, 2, 3, 4), 2).is_greedy(score)
    assert not Span((1, 2, 3, 4), 1).is_greedy(score)


def test_what_ends_a_text_stands_before_it_where_nothing_begins_one() -> None:
    tokenizer = Letters()
    assert begin_token(tokenizer) == BEGIN
    tokenizer.bos_token_id = None  # type: ignore[assignment]
    assert begin_token(tokenizer) == 2
    tokenizer.eos_token_id = None  # type: ignore[assignment]
    with pytest.raises(RequestError, match="no token that begins or ends"):
        begin_token(tokenizer)
