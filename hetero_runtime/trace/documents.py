"""The texts that a trace is recorded on."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hetero_runtime.errors import RequestError

TokenIds = tuple[int, ...]
_BLANK_LINES = re.compile(r"\n[ \t\r]*\n\s*")


def read_documents(file: Path) -> list[str]:
    """Documents of a text file, parted by blank lines, or of a `.jsonl` file, one `{"text": ...}` a line.

    Raises RequestError that names file and line.
    """
    try:
        content = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"{file}: cannot be read ({error}); give a UTF-8 text file or a .jsonl") from error
    if file.suffix == ".jsonl":
        documents = [_text_of(file, i, line) for i, line in enumerate(content.split("\n"), 1) if line.strip()]
    else:
        documents = [text for text in _BLANK_LINES.split(content.strip()) if text]
    if not documents:
        raise RequestError(f"{file}: holds no document; write texts with a blank line between them")
    return documents


def encode(
    documents: Sequence[str], tokenizer: Any, *, cut: int | None, num_new: int, max_length: int
) -> list[TokenIds]:
    """Token ids of each document, at most `cut` of them (None: all).

    `num_new` tokens will be generated after them, in a row of `max_length`. Raises RequestError that names
    the first document that does not fit.
    """
    if cut is not None and cut < 1:
        raise RequestError(f"cut is {cut}; keep 1 token or more of each document")
    encoded = [tuple(tokenizer(text)["input_ids"])[:cut] for text in documents]
    for i, ids in enumerate(encoded, 1):
        if not ids:
            raise RequestError(f"document {i} has no tokens; take it out")
        if len(ids) + num_new > max_length:
            room = max_length - num_new
            ways = [f"cut documents to {room} tokens (--cut {room})"] if room > 0 else []
            ways += [f"set execution.max_length to {len(ids) + num_new} or more"]
            raise RequestError(
                f"document {i} has {len(ids)} tokens, and {num_new} are to be generated: over "
                f"execution.max_length {max_length}; {', or '.join(ways)}"
            )
    return encoded


def _text_of(file: Path, number: int, line: str) -> str:
    try:
        text = json.loads(line)["text"]
    except (ValueError, KeyError, TypeError) as error:
        raise RequestError(f'{file}, line {number}: is no JSON object with "text"') from error
    if not isinstance(text, str) or not text.strip():
        raise RequestError(f'{file}, line {number}: "text" is {text!r:.40}; give a text that is not empty')
    return text
