"""Requests: withdrawal, deadlines, timings, and prompts that cannot be served."""

from __future__ import annotations

import threading
import time

import pytest

from hetero_runtime.errors import RequestError
from hetero_runtime.generation import CancelToken, Request, SamplingParams, Timings, check_prompt


def test_cancellation_from_another_thread() -> None:
    request = Request(prompt_ids=(1, 2))
    assert request.interruption() is None
    thread = threading.Thread(target=request.cancel.cancel)
    thread.start()
    thread.join()
    assert request.cancel.is_cancelled
    assert request.interruption() == "cancelled"


def test_each_request_has_its_own_token() -> None:
    first, second = Request(prompt_ids=(1,)), Request(prompt_ids=(1,))
    first.cancel.cancel()
    assert not second.cancel.is_cancelled


def test_deadline() -> None:
    assert Request(prompt_ids=(1,), deadline_s=time.monotonic() + 60).interruption() is None
    late = Request(prompt_ids=(1,), deadline_s=time.monotonic() - 0.001)
    assert late.interruption() == "deadline"


def test_cancellation_goes_before_the_deadline() -> None:
    token = CancelToken()
    token.cancel()
    assert Request(prompt_ids=(1,), cancel=token, deadline_s=0.0).interruption() == "cancelled"


@pytest.mark.parametrize(("num_tokens", "tok_s"), [(0, 0.0), (1, 0.0), (5, 2.0)])
def test_timings(num_tokens: int, tok_s: float) -> None:
    assert Timings.between(10.0, 10.5, 12.5, num_tokens=num_tokens) == Timings(0.5, 2.0, tok_s)
    assert Timings.between(10.0, 10.5, 10.5, num_tokens=num_tokens).tok_s == 0.0


def test_prompt_that_just_fits() -> None:
    check_prompt([1] * 90, 100, SamplingParams(max_tokens=10), vocab_size=2)


def test_empty_prompt() -> None:
    with pytest.raises(RequestError, match="prompt is empty"):
        check_prompt([], 100, SamplingParams())


def test_prompt_and_answer_over_the_context() -> None:
    with pytest.raises(RequestError) as caught:
        check_prompt([1] * 95, 100, SamplingParams(max_tokens=10))
    assert str(caught.value) == (
        "the prompt has 95 tokens and max_tokens is 10: 105 together, over execution.max_length 100; "
        "shorten the prompt by 5 tokens, or set max_tokens to 5 or less, "
        "or set execution.max_length to 105 or more"
    )


def test_prompt_alone_over_the_context() -> None:
    with pytest.raises(RequestError) as caught:
        check_prompt([1] * 120, 100, SamplingParams(max_tokens=10))
    assert "shorten the prompt by 30 tokens, or set execution.max_length to 130 or more" in str(caught.value)
    assert "set max_tokens" not in str(caught.value)


def test_images_over_the_context() -> None:
    with pytest.raises(RequestError) as caught:
        check_prompt([1] * 120, 100, SamplingParams(max_tokens=10), num_image_tokens=100)
    assert "the prompt has 120 tokens (100 of them for images)" in str(caught.value)
    assert "shorten the prompt by 30 tokens, or give smaller or fewer images, or" in str(caught.value)


def test_answer_alone_over_the_context() -> None:
    with pytest.raises(RequestError) as caught:
        check_prompt([1] * 4, 100, SamplingParams(max_tokens=256))
    assert "shorten" not in str(caught.value)
    assert "set max_tokens to 96 or less" in str(caught.value)


@pytest.mark.parametrize("token", [-1, 50])
def test_token_of_another_tokenizer(token: int) -> None:
    with pytest.raises(RequestError, match=rf"prompt token 2 is {token}; the model knows ids 0 to 49"):
        check_prompt([1, 2, token], 1000, SamplingParams(), vocab_size=50)
