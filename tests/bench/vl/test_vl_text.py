"""Rows of questions are what the chat template gives for each, one after the other."""

from __future__ import annotations

from tokenizers import Tokenizer

from bench.models import chat
from bench.vl.questions import Question
from bench.vl.text import (
    NO_TARGET,
    PAD_SEGMENT,
    PREFIX_LENGTH,
    ROW_LENGTH,
    RowWriter,
    prefix_ids,
    wrap_tokenizer,
)

QUESTIONS = [
    Question("colour", "What colour is the star?", "red"),
    Question("list", "What do you see?", "red star, blue ring, 472"),
]
IMAGE_PAD = "<|image_pad|>"


def test_a_segment_is_what_the_template_renders(tokenizer: Tokenizer) -> None:
    wrapped = wrap_tokenizer(tokenizer, 512)
    rows, kept = RowWriter(tokenizer).write(QUESTIONS)
    assert kept == QUESTIONS
    for number, question in enumerate(QUESTIONS, 1):
        messages = [
            {
                "role": "user",
                "content": [{"type": "image"}, {"type": "text", "text": question.text}],
            },
            {"role": "assistant", "content": question.answer},
        ]
        text = wrapped.apply_chat_template(messages, tokenize=False)
        picture = IMAGE_PAD * (PREFIX_LENGTH - 3)
        wanted = tokenizer.encode(text.replace(IMAGE_PAD, picture)).ids
        tokens, _, places, targets = rows[:, rows[1] == number]
        assert [*prefix_ids(tokenizer), *tokens.tolist()] == wanted[:-1]
        assert places.tolist() == list(range(len(places)))
        answer = [*tokenizer.encode(question.answer).ids, tokenizer.token_to_id(chat.END)]
        assert targets[targets != NO_TARGET].tolist() == answer
        assert targets[-len(answer) :].tolist() == answer


def test_what_does_not_fit_is_left_out(tokenizer: Tokenizer) -> None:
    long = Question("list", "What do you see?", ", ".join(["red star"] * 60))
    rows, kept = RowWriter(tokenizer).write([QUESTIONS[0], long, QUESTIONS[1]])
    assert kept == QUESTIONS
    assert set(rows[1].tolist()) == {1, 2, PAD_SEGMENT}
    assert rows.shape == (4, ROW_LENGTH)


def test_any_text_has_tokens(tokenizer: Tokenizer) -> None:
    text = "Grüße: {x} 🦊"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_system_words_go_to_the_question(tokenizer: Tokenizer) -> None:
    messages = [{"role": "system", "content": "Look."}, {"role": "user", "content": "Hi."}]
    rendered = wrap_tokenizer(tokenizer, 512).apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    assert rendered == "<|user|>Look.\n\nHi.<|end|><|assistant|>"
