"""Messages to prompts, and every way to get them wrong."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from hetero_runtime.errors import RequestError
from hetero_runtime.generation import render_messages

IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
TEXT = {"type": "text", "text": "What is this?"}


def test_text_messages(tokenizer: PreTrainedTokenizerFast) -> None:
    ids = render_messages(
        tokenizer, [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi 🦊"}]
    )
    assert tokenizer.decode(ids) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi 🦊<|im_end|>\n<|im_start|>assistant\n"
    )
    assert ids[0] == tokenizer.convert_tokens_to_ids("<|im_start|>")


def test_text_parts_become_one_text(tokenizer: PreTrainedTokenizerFast) -> None:
    parts = [TEXT, {"type": "text", "text": "Say it."}]
    ids = render_messages(tokenizer, [{"role": "user", "content": parts}])
    assert "user\nWhat is this?\nSay it.<|im_end|>" in tokenizer.decode(ids)


@pytest.mark.parametrize("image", [IMAGE, {"type": "image", "image": object()}], ids=["image_url", "image"])
def test_images_become_place_holders(vision_tokenizer: PreTrainedTokenizerFast, image: Any) -> None:
    messages = [{"role": "user", "content": [image, TEXT]}]
    before = copy.copy(messages[0]["content"])
    ids = render_messages(vision_tokenizer, messages)
    assert "user\n<|image|>What is this?<|im_end|>" in vision_tokenizer.decode(ids)
    assert messages[0]["content"] == before


def test_assistant_with_tool_calls_needs_no_content(vision_tokenizer: PreTrainedTokenizerFast) -> None:
    call = {"function": {"name": "f", "arguments": {}}, "type": "function"}
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    assert render_messages(vision_tokenizer, messages)


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ("Hi", "messages is a str; give a list"),
        ({"role": "user", "content": "Hi"}, "messages is a dict; give a list"),
        ([], "messages is empty; give at least one"),
        (["Hi"], r"messages\[0\] is a str; give a dict"),
        (
            [{"role": "user", "content": "a"}, {"content": "b"}],
            r"messages\[1\].role is None; allowed: system",
        ),
        ([{"role": "bot", "content": "a"}], r"messages\[0\].role is 'bot'; allowed"),
        ([{"role": "user"}], r"messages\[0\].content is missing; give"),
        ([{"role": "user", "content": 3}], r"messages\[0\].content is int 3; give"),
        ([{"role": "user", "content": []}], r"messages\[0\].content is list \[\]; give"),
        ([{"role": "user", "content": ["a"]}], r"messages\[0\].content\[0\] has type 'a'; allowed: text"),
        ([{"role": "user", "content": [TEXT, {"type": "audio"}]}], r"content\[1\] has type 'audio'; allowed"),
        ([{"role": "user", "content": [{"type": "text"}]}], r"content\[0\] has no text; give"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], r"content\[0\] has no image; give"),
        ([{"role": "user", "content": [{"type": "image", "image": None}]}], r"content\[0\] has no image"),
    ],
)
def test_wrong_messages(tokenizer: PreTrainedTokenizerFast, messages: Any, expected: str) -> None:
    with pytest.raises(RequestError, match=expected):
        render_messages(tokenizer, messages)


def test_tokenizer_without_template(plain_tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(RequestError, match="no chat template"):
        render_messages(plain_tokenizer, [{"role": "user", "content": "Hi"}])


def test_image_for_a_text_model(tokenizer: PreTrainedTokenizerFast) -> None:
    messages = [{"role": "system", "content": "x"}, {"role": "user", "content": [TEXT, IMAGE]}]
    with pytest.raises(RequestError, match=r"messages\[1\] has an image.*only text"):
        render_messages(tokenizer, messages)


def test_template_that_refuses(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(RequestError, match="chat template refused the messages: tools are not known"):
        render_messages(tokenizer, [{"role": "tool", "content": "1"}])
