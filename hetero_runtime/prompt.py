"""From what a caller gives to what the model takes: ids, and images where the model sees."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hetero_runtime.errors import RequestError
from hetero_runtime.generation import (
    Message,
    SamplingParams,
    check_prompt,
    collect_images,
    render_messages,
)

if TYPE_CHECKING:
    import torch

    from hetero_runtime.hf.images import ImageProcessor

Prompt = str | Sequence[int] | Sequence[Message]
"""Text, token ids, or messages in OpenAI form."""


class ReadPrompt(NamedTuple):
    """A prompt that can be served. `text_ids`: the ids whose text goes on in the answer (none in a chat)."""

    ids: tuple[int, ...]
    text_ids: tuple[int, ...]
    images: dict[str, torch.Tensor] | None


class PromptReader:
    """Reads prompts for one model. `config`: its transformers config; `max_length`: tokens of one row."""

    def __init__(self, path: Path, *, tokenizer: Any, config: Any, has_images: bool, max_length: int) -> None:
        self._path, self._tokenizer, self._config = path, tokenizer, config
        self._vocab_size = config.get_text_config(decoder=True).vocab_size
        self._has_images, self._max_length = has_images, max_length
        self._processor: ImageProcessor | None = None

    def read(self, prompt: Prompt, params: SamplingParams) -> ReadPrompt:
        """Raises RequestError that says what is wrong with `prompt` and what to give instead."""
        if isinstance(prompt, str):
            ids = tuple(self._tokenizer(prompt)["input_ids"])
            return self._checked(ReadPrompt(ids, ids, None), params)
        if isinstance(prompt, Sequence) and all(isinstance(part, Mapping) for part in prompt) and prompt:
            return self._checked(self._read_messages(prompt), params)  # type: ignore[arg-type]
        if isinstance(prompt, Sequence) and all(_is_token_id(part) for part in prompt):
            ids = tuple(int(part) for part in prompt)  # type: ignore[arg-type]
            return self._checked(ReadPrompt(ids, ids, None), params)
        raise RequestError(
            f"the prompt is a {_describe(prompt)}; give a text, a list of token ids, or a list of "
            'messages [{"role": "user", "content": "..."}]'
        )

    def _read_messages(self, messages: Sequence[Message]) -> ReadPrompt:
        images = collect_images(messages)
        if images and not self._has_images:
            raise RequestError(
                "the messages hold images, but this model reads text alone: leave the images out or load a "
                "vision-language model"
            )
        ids = render_messages(self._tokenizer, messages)
        if not images:
            return ReadPrompt(tuple(ids), (), None)
        prepared = self._image_processor().prepare(ids, images)
        return ReadPrompt(prepared.ids, (), prepared.inputs)

    def _checked(self, prompt: ReadPrompt, params: SamplingParams) -> ReadPrompt:
        check_prompt(prompt.ids, self._max_length, params, vocab_size=self._vocab_size)
        return prompt

    def _image_processor(self) -> ImageProcessor:
        if self._processor is None:
            from hetero_runtime.hf.images import ImageProcessor

            self._processor = ImageProcessor(self._path, self._config)
        return self._processor


def _is_token_id(part: object) -> bool:
    """Whole numbers, numpy's as well; True and False count as none."""
    return isinstance(part, Integral) and not isinstance(part, bool)


def _describe(prompt: object) -> str:
    name = type(prompt).__name__
    if not isinstance(prompt, Sequence) or isinstance(prompt, bytes):
        return name
    return f"{name} of {' and '.join(sorted({type(part).__name__ for part in prompt}))}"
