"""Questions as tokens: the tokenizer, its chat template, and rows of many questions about one picture.

    <|user|><|vision_start|>144 × <|image_pad|><|vision_end|>  prefix, seen by every question
    What colour is the star?<|end|><|assistant|>red<|end|>     segment 1
    How many rings are there?<|end|><|assistant|>2<|end|>      segment 2, does not see segment 1
    ...

Each segment stands where it would stand alone, so that one pass over a picture teaches a dozen questions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from bench.models import chat
from bench.models.corpus import SEPARATOR
from bench.models.tokenizer import PAD, train_tokenizer
from bench.vl.drawing import NUM_CELLS
from bench.vl.questions import Question, ask
from bench.vl.scenes import Scene, draw_scene

VISION_START, VISION_END, IMAGE, VIDEO = (
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
VISION_TOKENS = (VISION_START, VISION_END, IMAGE, VIDEO)
VOCAB_SIZE = 400
PREFIX_LENGTH = NUM_CELLS + 3
ROW_LENGTH = 125
"""Tokens of a row after the prefix; together a multiple of 8, as attention with a mask likes it."""
NO_TARGET = -1
PAD_SEGMENT = 255
_SAMPLE_SCENES = 3000

TEMPLATE = """\
{%- macro parts(content) -%}
{%- if content is string -%}
{{- content -}}
{%- else -%}
{%- for part in content -%}
{{- '<|vision_start|><|image_pad|><|vision_end|>' if part['type'] == 'image' else part['text'] -}}
{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
{%- set ns = namespace(system='') -%}
{%- for message in messages -%}
{%- if message['role'] == 'system' -%}
{%- set ns.system = parts(message['content']) + '\\n\\n' -%}
{%- elif message['role'] == 'user' -%}
{{- '<|user|>' + ns.system + parts(message['content']) + '<|end|>' -}}
{%- set ns.system = '' -%}
{%- elif message['role'] == 'assistant' -%}
{{- '<|assistant|>' + parts(message['content']) + '<|end|>' -}}
{%- else -%}
{{- raise_exception('role must be system, user or assistant, not ' + message['role']) -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|assistant|>' -}}
{%- endif -%}
"""

Rows = npt.NDArray[np.int16]
"""`[4, ROW_LENGTH]`: tokens, segments (from 1), places in them, the next token where it is an answer."""


def make_tokenizer() -> Tokenizer:
    """Byte-level BPE of at most VOCAB_SIZE tokens, learnt from questions about training pictures."""
    tokenizer = train_tokenizer(_sample(), VOCAB_SIZE - len(VISION_TOKENS))
    tokenizer.add_special_tokens(list(VISION_TOKENS))
    return tokenizer


def _sample() -> Iterator[str]:
    for index in range(_SAMPLE_SCENES):
        scene, draw = draw_scene("train", seed=0, index=index), np.random.default_rng([0, index])
        for question in ask_many(scene, draw):
            yield f"{question.text}\n{question.answer}"


def ask_many(scene: Scene, draw: np.random.Generator, count: int = 24) -> list[Question]:
    """Up to `count` different questions about a scene, of the kinds that training asks for."""
    asked = (ask(scene, draw) for _ in range(count))
    return list(dict.fromkeys(question for question in asked if question is not None))


def prefix_ids(tokenizer: Tokenizer) -> list[int]:
    """The tokens of a picture with what stands before and after it, PREFIX_LENGTH of them."""
    names = [chat.USER, VISION_START, *[IMAGE] * NUM_CELLS, VISION_END]
    return [tokenizer.token_to_id(name) for name in names]


def wrap_tokenizer(tokenizer: Tokenizer, max_length: int) -> PreTrainedTokenizerFast:
    """The same tokenizer as transformers loads it, with the chat template and the tokens of pictures."""
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=SEPARATOR,
        eos_token=SEPARATOR,
        pad_token=PAD,
        extra_special_tokens={"image_token": IMAGE, "video_token": VIDEO},
        model_max_length=max_length,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = TEMPLATE
    return wrapped


class RowWriter:
    """Turns questions into rows of tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._encode: Callable[[str], tuple[int, ...]] = lru_cache(1 << 16)(
            lambda text: tuple(tokenizer.encode(text).ids)
        )
        self._pad, self._end = tokenizer.token_to_id(PAD), tokenizer.token_to_id(chat.END)
        self._assistant = tokenizer.token_to_id(chat.ASSISTANT)

    def write(self, questions: Sequence[Question]) -> tuple[Rows, list[Question]]:
        """A row of as many questions as fit, in order, and which those are."""
        rows = np.empty((4, ROW_LENGTH), dtype=np.int16)
        rows[:] = np.array([self._pad, PAD_SEGMENT, 0, NO_TARGET])[:, None]
        begin, kept = 0, list[Question]()
        for question in questions:
            asked = [*self._encode(question.text), self._end, self._assistant]
            answer = [*self._encode(question.answer), self._end]
            end = begin + len(asked) + len(answer) - 1  # the last token predicts nothing, so it is left out
            if end > ROW_LENGTH:
                continue
            kept.append(question)
            rows[0, begin:end] = (asked + answer)[:-1]
            rows[1, begin:end] = len(kept)
            rows[2, begin:end] = np.arange(end - begin)
            rows[3, end - len(answer) : end] = answer
            begin = end
        return rows, kept
