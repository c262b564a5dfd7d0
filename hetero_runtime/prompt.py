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
        self._image_token = _image_token(config, tokenizer) if has_images else None
        self._max_length = max_length
        self._processor: ImageProcessor | None = None

    def read(self, prompt: Prompt, params: SamplingParams) -> ReadPrompt:
        """Raises RequestError that says what is wrong with `prompt` and what to give instead."""
        if isinstance(prompt, str):
            return self._read_text(tuple(self._tokenizer(prompt)["input_ids"]), params)
        if isinstance(prompt, Sequence) and all(isinstance(part, Mapping) for part in prompt) and prompt:
            return self._read_messages(prompt, params)  # type: ignore[arg-type]
        if isinstance(prompt, Sequence) and all(_is_token_id(part) for part in prompt):
            return self._read_text(tuple(int(part) for part in prompt), params)  # type: ignore[arg-type]
        raise RequestError(
            f"the prompt is a {_describe(prompt)}; give a text, a list of token ids, or a list of "
            'messages [{"role": "user", "content": "..."}]'
        )

    def _read_text(self, ids: tuple[int, ...], params: SamplingParams) -> ReadPrompt:
        self._check(ids, params, num_images=0)
        return ReadPrompt(ids, ids, None)

    def _read_messages(self, messages: Sequence[Message], params: SamplingParams) -> ReadPrompt:
        images = collect_images(messages)
        if images and self._image_token is None:
            raise RequestError(
                "the messages hold images, but this model reads text alone: leave the images out or load a "
                "vision-language model"
            )
        ids = tuple(render_messages(self._tokenizer, messages))
        self._check(ids, params, num_images=len(images))
        if not images:
            return ReadPrompt(ids, (), None)
        processor = self._image_processor()
        num_tokens = processor.num_tokens(images)
        ids = _expand(ids, self._image_token, num_tokens)
        self._check_length(ids, params, num_image_tokens=sum(num_tokens))
        return ReadPrompt(ids, (), self._as_computed(processor.inputs(ids, images)))

    def _as_computed(self, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Pixels in the type that the model makes of them first: mostly half the bytes for the link."""
        dtype = self._config.dtype
        if dtype is None:
            return inputs
        return {name: each.to(dtype) if each.is_floating_point() else each for name, each in inputs.items()}

    def _check(self, ids: tuple[int, ...], params: SamplingParams, *, num_images: int) -> None:
        """Of a prompt with a single place-holder for each image."""
        self._check_length(ids, params)
        num_places = 0 if self._image_token is None else ids.count(self._image_token)
        if num_places != num_images:
            raise RequestError(
                f"the prompt has {num_places} image place-holders and {num_images} images; give messages "
                "with one image for each place-holder"
            )

    def _check_length(
        self, ids: tuple[int, ...], params: SamplingParams, *, num_image_tokens: int = 0
    ) -> None:
        check_prompt(
            ids,
            self._max_length,
            params,
            vocab_size=self._vocab_size,
            num_image_tokens=num_image_tokens,
        )

    def _image_processor(self) -> ImageProcessor:
        if self._processor is None:
            from hetero_runtime.hf.images import make_image_processor

            self._processor = make_image_processor(self._path, self._config, self._tokenizer)
        return self._processor


def _image_token(config: Any, tokenizer: Any) -> int:
    from hetero_runtime.hf.images import image_token_id

    return image_token_id(config, tokenizer)


def _expand(ids: Sequence[int], image_token: int | None, num_tokens: Sequence[int]) -> tuple[int, ...]:
    """`ids` with the i-th `image_token` `num_tokens[i]` times."""
    counts = iter(num_tokens)
    return tuple(token for each in ids for token in [each] * (next(counts) if each == image_token else 1))


def _is_token_id(part: object) -> bool:
    """Whole numbers, numpy's as well; True and False count as none."""
    return isinstance(part, Integral) and not isinstance(part, bool)


def _describe(prompt: object) -> str:
    name = type(prompt).__name__
    if not isinstance(prompt, Sequence) or isinstance(prompt, bytes):
        return name
    return f"{name} of {' and '.join(sorted({type(part).__name__ for part in prompt}))}"
