"""Tokens in, deltas out: the end of a stream in all its forms."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from hetero_runtime.generation.params import SamplingParams
from hetero_runtime.generation.request import Delta
from hetero_runtime.generation.text_stream import TextStream, special_stop_ids


def stream_of(tokenizer: PreTrainedTokenizerFast, **params: Any) -> TextStream:
    return TextStream(tokenizer, SamplingParams(**params), eos_token_ids=[tokenizer.eos_token_id])


def push_text(stream: TextStream, tokenizer: PreTrainedTokenizerFast, text: str) -> list[Delta]:
    """Push the tokens of `text` until the stream ends."""
    deltas = []
    for token_id in tokenizer.encode(text):
        deltas.append(stream.push(token_id))
        if deltas[-1].finish_reason:
            break
    return deltas


def test_eos_ends_with_held_text_and_without_its_own(tokenizer: PreTrainedTokenizerFast) -> None:
    stream = stream_of(tokenizer, stop=("!!!",))
    push_text(stream, tokenizer, "Hi!!")
    assert stream.text == "Hi"
    last = stream.push(tokenizer.eos_token_id)
    assert last == Delta(text="!!", token_id=tokenizer.eos_token_id, finish_reason="stop")
    assert (stream.text, stream.finish_reason) == ("Hi!!", "stop")
    assert stream.token_ids[-1] == tokenizer.eos_token_id


def test_length_counts_tokens_and_flushes_half_a_character(tokenizer: PreTrainedTokenizerFast) -> None:
    stream = stream_of(tokenizer, max_tokens=2)
    deltas = push_text(stream, tokenizer, "🧊")
    assert [delta.finish_reason for delta in deltas] == [None, "length"]
    assert stream.text == "\ufffd"


def test_stop_string_in_the_last_allowed_token_is_a_stop(tokenizer: PreTrainedTokenizerFast) -> None:
    num_tokens = len(tokenizer.encode("a#"))
    stream = stream_of(tokenizer, stop=("#",), max_tokens=num_tokens)
    assert push_text(stream, tokenizer, "a#b")[-1].finish_reason == "stop"
    assert stream.text == "a"


@pytest.mark.parametrize("reason", ["cancelled", "deadline"])
def test_giving_up_hands_out_what_was_held(tokenizer: PreTrainedTokenizerFast, reason: Any) -> None:
    stream = stream_of(tokenizer, stop=("zzz",))
    push_text(stream, tokenizer, "fizz")
    assert stream.finish(reason) == Delta(text="zz", token_id=None, finish_reason=reason)
    assert (stream.text, stream.finish_reason) == ("fizz", reason)


def test_stop_string_that_is_a_special_token(tokenizer: PreTrainedTokenizerFast) -> None:
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert special_stop_ids(tokenizer, ("<|im_end|>", "a", "no such token")) == {end}
    stream = stream_of(tokenizer, stop=("<|im_end|>",), ignore_eos=True)
    push_text(stream, tokenizer, "Hello")
    assert stream.push(tokenizer.eos_token_id).finish_reason is None
    assert stream.push(end).finish_reason == "stop"
    assert stream.text == "Hello"


def test_nothing_may_follow_the_end(tokenizer: PreTrainedTokenizerFast) -> None:
    stream = stream_of(tokenizer)
    stream.push(tokenizer.eos_token_id)
    with pytest.raises(AssertionError, match="after the end"):
        stream.push(1)
    with pytest.raises(AssertionError, match="finished twice"):
        stream.finish("cancelled")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(text=st.text("ab 你🦊", max_size=20), stop=st.text("ab 你🦊", min_size=1, max_size=3))
def test_text_is_everything_before_the_stop_string(
    tokenizer: PreTrainedTokenizerFast, text: str, stop: str
) -> None:
    stream = stream_of(tokenizer, stop=(stop,))
    deltas = push_text(stream, tokenizer, text)
    if stream.finish_reason is None:
        deltas.append(stream.push(tokenizer.eos_token_id))
    assert stream.text == text.partition(stop)[0]
    assert "".join(delta.text for delta in deltas) == stream.text
