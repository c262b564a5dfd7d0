"""Documents of a file, and what is said of a file that holds none."""

from __future__ import annotations

from pathlib import Path

import pytest

from hetero_runtime.errors import RequestError
from hetero_runtime.trace.documents import read_documents


def test_blank_lines_part_documents_of_a_text_file(tmp_path: Path) -> None:
    file = tmp_path / "texts.txt"
    file.write_text("\n\nOne,\nstill one.\n \t\n\nTwo.\r\n\r\nThree.\n\n")
    assert read_documents(file) == ["One,\nstill one.", "Two.", "Three."]


def test_jsonl_keeps_texts_as_they_are(tmp_path: Path) -> None:
    file = tmp_path / "texts.jsonl"
    file.write_text('{"text": "One.\\n\\nStill one."}\n\n{"text": "Two.", "kind": "story"}\n')
    assert read_documents(file) == ["One.\n\nStill one.", "Two."]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b" \n\n ", "holds no document"),
        ("a.txt", b"\xff\xfe\x00", "cannot be read"),
        ("a.jsonl", b'{"text": "x"}\nnot json\n', "line 2: is no JSON object"),
        ("a.jsonl", b'{"prompt": "x"}\n', "line 1: is no JSON object"),
        ("a.jsonl", b"[1]\n", "line 1: is no JSON object"),
        ("a.jsonl", b'{"text": "  "}\n', 'line 1: "text" is'),
    ],
)
def test_what_holds_no_documents_is_refused(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    file = tmp_path / name
    file.write_bytes(content)
    with pytest.raises(RequestError, match=message):
        read_documents(file)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"none\.txt: cannot be read"):
        read_documents(tmp_path / "none.txt")
