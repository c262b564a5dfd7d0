"""Chat messages in OpenAI form to the tokens of a prompt.

    [{"role": "user", "content": "Hello"}]
    [{"role": "user", "content": [{"type": "text", "text": "What is this?"},
                                  {"type": "image_url", "image_url": {"url": "data:image/png;base64,..."}},
                                  {"type": "image", "image": <PIL image, array or path>}]}]

The pictures themselves: `generation/images.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError

from hetero_runtime.errors import RequestError
from hetero_runtime.generation.base import Message, Tokenizer

ROLES = ("system", "developer", "user", "assistant", "tool")
PART_TYPES = ("text", "image_url", "image")
IMAGE_TYPES = ("image_url", "image")


def render_messages(tokenizer: Tokenizer, messages: Sequence[Message]) -> list[int]:
    """Token ids of a conversation, up to the place where the assistant answers.

    Each image becomes the template's single place-holder; expanding it to the right number of
    tokens is the image processor's work. `messages` stay untouched. Raises RequestError with the
    index of the message and the fix.
    """
    check_messages(messages)
    if not tokenizer.chat_template:
        raise RequestError(
            "this tokenizer has no chat template, so messages cannot be turned into a prompt: pass a plain "
            "text prompt, or add chat_template.jinja to the model folder"
        )
    try:
        # Templates that know pictures ask each part for its type; all others expect plain text.
        takes_images = "image" in tokenizer.get_chat_template()
        conversation = [_template_message(message, i, takes_images) for i, message in enumerate(messages)]
        prompt_ids = tokenizer.apply_chat_template(
            conversation, add_generation_prompt=True, tokenize=True, return_dict=False
        )
    except (TemplateError, TypeError, ValueError) as error:
        raise RequestError(f"the model's chat template refused the messages: {error}") from error
    return list(prompt_ids)


def check_messages(messages: Sequence[Message]) -> None:
    """Raise RequestError, with index and fix, for anything that is not a list of OpenAI messages."""
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        raise RequestError(
            f'messages is a {type(messages).__name__}; give a list: [{{"role": "user", "content": "..."}}]'
        )
    if not messages:
        raise RequestError('messages is empty; give at least one: [{"role": "user", "content": "..."}]')
    for index, message in enumerate(messages):
        _check_message(message, f"messages[{index}]")


def image_parts(messages: Sequence[Message]) -> list[tuple[str, Any]]:
    """Where each image of checked `messages` stands ("messages[1].content[0]"), and what was given for it."""
    return [
        (f"messages[{i}].content[{j}]", _image_source(part))
        for i, message in enumerate(messages)
        if not isinstance(message.get("content"), str | None)
        for j, part in enumerate(message["content"])
        if part["type"] in IMAGE_TYPES
    ]


def _check_message(message: object, where: str) -> None:
    if not isinstance(message, Mapping):
        raise RequestError(f"{where} is a {type(message).__name__}; give a dict with role and content")
    if message.get("role") not in ROLES:
        raise RequestError(f"{where}.role is {message.get('role')!r}; allowed: {', '.join(ROLES)}")
    content = message.get("content")
    if isinstance(content, str) or (content is None and message.get("tool_calls")):
        return
    if isinstance(content, Mapping) or not isinstance(content, Sequence) or not content:
        shown = "missing" if content is None else f"{type(content).__name__} {content!r:.40}"
        raise RequestError(f"{where}.content is {shown}; give a text, or a list of parts that is not empty")
    for index, part in enumerate(content):
        _check_part(part, f"{where}.content[{index}]")


def _check_part(part: object, where: str) -> None:
    if not isinstance(part, Mapping) or part.get("type") not in PART_TYPES:
        kind = part.get("type") if isinstance(part, Mapping) else part
        raise RequestError(f"{where} has type {kind!r:.40}; allowed: {', '.join(PART_TYPES)}")
    if part["type"] == "text":
        if not isinstance(part.get("text"), str):
            raise RequestError(f'{where} has no text; give {{"type": "text", "text": "..."}}')
    elif _image_source(part) is None:
        raise RequestError(
            f'{where} has no image; give {{"type": "image_url", "image_url": {{"url": "data:..."}}}} '
            'or {"type": "image", "image": ...}'
        )


def _image_source(part: Mapping[str, Any]) -> Any:
    """What was given as the image of a part: `image_url.url`, `image_url` as a text, or `image`."""
    source = part.get(part["type"])
    return source.get("url") if isinstance(source, Mapping) else source


def _template_message(message: Message, index: int, takes_images: bool) -> dict[str, Any]:
    """A message as the template wants it: parts for those that know pictures, else text alone."""
    content = message.get("content")
    if isinstance(content, str) or content is None:
        return dict(message)
    has_image = any(part["type"] in IMAGE_TYPES for part in content)
    if has_image and not takes_images:
        raise RequestError(
            f"messages[{index}] has an image, but this model's chat template knows only text: "
            "leave the image out or load a vision-language model"
        )
    if has_image:
        parts = [{"type": "image"} if part["type"] in IMAGE_TYPES else dict(part) for part in content]
        return {**message, "content": parts}
    return {**message, "content": "\n".join(part["text"] for part in content)}
