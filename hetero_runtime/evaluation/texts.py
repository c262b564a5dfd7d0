"""Texts to evaluate on, cut into rows that a model can take.

document   t0 t1 t2 t3 t4 t5 t6 t7 t8      length 4
rows       t0 t1 t2 t3 t4                  each begins with the last token of the one before,
                       t4 t5 t6 t7 t8      so that every token but t0 is predicted once
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from hetero_runtime.errors import RequestError
from hetero_runtime.evaluation.base import TokenIds
from hetero_runtime.trace.documents import read_documents

_TEXT, _JSON_LINES = (".txt", ".md"), ".jsonl"


def read_texts(path: Path) -> list[str]:
    """Documents of `path`: a text file is one, a `.jsonl` file holds one `{"text": ...}` a line, a folder
    holds such files (`.txt`, `.md`, `.jsonl`), taken in the order of their names.

    Raises RequestError that names the file, and the line where it is a `.jsonl`.
    """
    if not path.is_dir():
        return read_documents(path) if path.suffix == _JSON_LINES else [_whole(path)]
    files = sorted(file for file in path.rglob("*") if file.suffix in (*_TEXT, _JSON_LINES))
    if not files:
        raise RequestError(f"{path}: holds no {', '.join((*_TEXT, _JSON_LINES))} file; put texts there")
    return [text for file in files for text in read_texts(file)]


def cut_rows(documents: Iterable[Sequence[int]], length: int) -> list[TokenIds]:
    """Rows of at most `length` predicted tokens, as drawn above; documents of one token predict nothing and
    are left out. Raises RequestError where `length` is below 1 or nothing is left."""
    if length < 1:
        raise RequestError(f"length is {length}; predict 1 token or more in each window")
    rows = [
        tuple(ids[begin : begin + length + 1])
        for ids in documents
        for begin in range(0, len(ids) - 1, length)
    ]
    if not rows:
        raise RequestError("the text has fewer than two tokens in each document; there is nothing to predict")
    return rows


def spread(rows: Sequence[TokenIds], count: int | None) -> list[TokenIds]:
    """`count` of `rows`, evenly over the whole of them; all where `count` is None or more than there are.

    Raises RequestError where `count` is below 1.
    """
    if count is None or count >= len(rows):
        return list(rows)
    if count < 1:
        raise RequestError(f"windows is {count}; take 1 or more")
    return [rows[i * len(rows) // count] for i in range(count)]


def tokenise(texts: Iterable[str], tokenizer: Any) -> list[list[int]]:
    """Token ids of each text, with the special tokens that the tokenizer itself adds."""
    return [list(tokenizer(text)["input_ids"]) for text in texts]


def _whole(file: Path) -> str:
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(
            f"{file}: cannot be read ({error}); give UTF-8 text, a .jsonl or a folder"
        ) from error
    if not text.strip():
        raise RequestError(f"{file}: is empty; give a text to predict")
    return text
