"""What a lookahead predictor is taught on: prompts with the text that follows them.

{"text": ...}        its first half is the prompt, its second half what follows
{"messages": [...]}  OpenAI form, images too; where the last one is the assistant's, that is what follows,
                     else the model goes on itself
other files          parted by blank lines, each part a text
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hetero_runtime.errors import RequestError
from hetero_runtime.generation import SamplingParams
from hetero_runtime.trace.documents import read_documents

if TYPE_CHECKING:
    import torch

    from hetero_runtime.prompt import Prompt, PromptReader

Source = str | list[dict[str, Any]]
"""A text, or a conversation."""
_LEAST_TOKENS = 4
"""Of a text that teaches anything."""


class Lesson(NamedTuple):
    """`answer_ids`: None where the model is to write it."""

    prompt_ids: tuple[int, ...]
    images: dict[str, torch.Tensor] | None
    answer_ids: tuple[int, ...] | None


def read_lessons(file: Path) -> list[Source]:
    """Texts and conversations of `file`. Raises RequestError that names file and line."""
    if file.suffix != ".jsonl":
        return list(read_documents(file))
    try:
        lines = file.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"{file}: cannot be read ({error}); give a UTF-8 text file or a .jsonl") from error
    found = [_lesson_of(file, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise RequestError(f'{file}: is empty; write one {{"messages": [...]}} or {{"text": ...}} a line')
    return found


def prompt_of(source: str | list[dict[str, Any]]) -> Prompt:
    """What is asked for in `source`: a text as it is, a conversation without its answer."""
    if isinstance(source, str):
        return source
    return source[:-1] if _has_answer(source) else source


def encode_lessons(
    sources: Sequence[Source], reader: PromptReader, tokenizer: Any, *, length: int
) -> Iterator[Lesson]:
    """Each source as ids; texts are cut to `length` tokens. What is too short to teach anything is left out.

    Raises RequestError for a conversation that cannot be served.
    """
    for source in sources:
        if isinstance(source, str):
            ids = tuple(tokenizer(source)["input_ids"])[:length]
            if len(ids) >= _LEAST_TOKENS:
                middle = len(ids) // 2
                yield Lesson(ids[:middle], None, ids[middle:])
            continue
        prompt = reader.read(prompt_of(source), SamplingParams(max_tokens=1))
        answer: tuple[int, ...] = ()
        if _has_answer(source):
            answer = tuple(tokenizer(source[-1]["content"], add_special_tokens=False)["input_ids"])
        yield Lesson(prompt.ids, prompt.images, answer or None)


def _has_answer(messages: list[dict[str, Any]]) -> bool:
    return len(messages) > 1 and messages[-1].get("role") == "assistant"


def _lesson_of(file: Path, number: int, line: str) -> str | list[dict[str, Any]]:
    expected = 'give {"text": "..."} or {"messages": [{"role": ..., "content": ...}]}'
    try:
        read = json.loads(line)
    except ValueError as error:
        raise RequestError(f"{file}, line {number}: is no JSON ({error}); {expected}") from error
    if isinstance(read, dict) and isinstance(read.get("text"), str) and read["text"].strip():
        return str(read["text"])
    messages = read.get("messages") if isinstance(read, dict) else None
    if isinstance(messages, list) and messages and all(isinstance(each, dict) for each in messages):
        return messages
    raise RequestError(f"{file}, line {number}: {expected}")
