"""Pieces of text add up, and none ends in the middle of a character."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from hetero_runtime.generation.detokenize import REPLACEMENT, IncrementalDetokenizer

TEXTS = [
    "plain words here",
    "  leading and trailing  ",
    "你好,世界! こんにちは",
    "🦊 jumps over 🐕, 👩‍👩‍👧‍👦 watch",
    "é combining e\u0301, \t tabs\n\n   and lines\n",
    "a\ufffdb keeps its own replacement character\ufffd",
]


def pieces_of(
    tokenizer: PreTrainedTokenizerFast, token_ids: list[int], prompt_ids: list[int] | None = None
) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, prompt_ids=prompt_ids or [])
    return [*(detokenizer.push(token_id) for token_id in token_ids), detokenizer.flush()]


@pytest.mark.parametrize("text", TEXTS)
def test_text_comes_back_in_whole_characters(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    token_ids = tokenizer.encode(text)
    pieces = pieces_of(tokenizer, token_ids)
    assert "".join(pieces) == text
    if REPLACEMENT not in text:
        assert not any(REPLACEMENT in piece for piece in pieces)


def test_a_character_waits_for_its_last_byte(tokenizer: PreTrainedTokenizerFast) -> None:
    token_ids = tokenizer.encode("𝄞")  # not in the training text: four tokens of one byte
    assert len(token_ids) == 4
    assert pieces_of(tokenizer, token_ids) == ["", "", "", "𝄞", ""]
    assert pieces_of(tokenizer, token_ids[:2]) == ["", "", REPLACEMENT]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(text=st.text(max_size=40))
def test_any_text_comes_back(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    token_ids = tokenizer.encode(text)
    assert "".join(pieces_of(tokenizer, token_ids)) == tokenizer.decode(token_ids)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(token_ids=st.lists(st.integers(0, 319), max_size=25))
def test_any_tokens_add_up(tokenizer: PreTrainedTokenizerFast, token_ids: list[int]) -> None:
    """Also tokens that are no valid UTF-8, and special tokens in between."""
    whole = tokenizer.decode(token_ids, skip_special_tokens=True)
    assert "".join(pieces_of(tokenizer, token_ids)) == whole


def byte_tokens(character: str) -> list[str]:
    return [f"<0x{byte:02X}>" for byte in character.encode()]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    words=st.lists(
        st.sampled_from([["▁the"], ["▁fox"], ["▁"], ["a"], ["."]])
        | st.characters(codec="utf-8").map(byte_tokens),
        max_size=15,
    )
)
def test_a_decoder_that_eats_a_space_adds_up(
    metaspace_tokenizer: PreTrainedTokenizerFast, words: list[list[str]]
) -> None:
    token_ids = metaspace_tokenizer.convert_tokens_to_ids([token for word in words for token in word])
    whole = metaspace_tokenizer.decode(token_ids)
    assert "".join(pieces_of(metaspace_tokenizer, token_ids)) == whole


def test_the_space_after_a_prompt_is_kept(metaspace_tokenizer: PreTrainedTokenizerFast) -> None:
    the, fox = metaspace_tokenizer.convert_tokens_to_ids(["▁the", "▁fox"])
    assert pieces_of(metaspace_tokenizer, [fox, the]) == ["fox", " the", ""]
    assert pieces_of(metaspace_tokenizer, [fox, the], prompt_ids=[the] * 9) == [" fox", " the", ""]


def test_special_tokens_give_no_text(tokenizer: PreTrainedTokenizerFast) -> None:
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    a, b = tokenizer.encode("a"), tokenizer.encode(" b")
    assert pieces_of(tokenizer, [end, *a, end, *b, end]) == ["", "a", "", " b", "", ""]
