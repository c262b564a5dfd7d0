"""Texts as rows: every token but a document's first is predicted once."""

from __future__ import annotations

from pathlib import Path

import pytest

from hetero_runtime.errors import RequestError
from hetero_runtime.evaluation.texts import cut_rows, read_texts, spread


def test_every_token_but_the_first_is_predicted_once() -> None:
    document = list(range(9))
    rows = cut_rows([document], 4)
    assert rows == [(0, 1, 2, 3, 4), (4, 5, 6, 7, 8)]
    assert [token for row in rows for token in row[1:]] == document[1:]


def test_rows_do_not_cross_documents() -> None:
    assert cut_rows([[1, 2, 3, 4], [7], [5, 6]], 2) == [(1, 2, 3), (3, 4), (5, 6)]


@pytest.mark.parametrize(
    ("documents", "length", "said"), [([[1, 2]], 0, "length is 0"), ([[1], []], 4, "nothing to predict")]
)
def test_nothing_to_predict_is_refused(documents: list[list[int]], length: int, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        cut_rows(documents, length)


def test_fewer_windows_are_taken_evenly() -> None:
    rows = [(i, i) for i in range(10)]
    assert spread(rows, 4) == [(0, 0), (2, 2), (5, 5), (7, 7)]
    assert spread(rows, 99) == rows
    assert spread(rows, None) == rows
    with pytest.raises(RequestError, match="windows is 0"):
        spread(rows, 0)


def test_a_folder_gives_its_files_by_name(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("two\n\nparagraphs")
    (tmp_path / "a.jsonl").write_text('{"text": "first"}\n{"text": "second"}\n')
    (tmp_path / "ignored.bin").write_bytes(b"\xff")
    assert read_texts(tmp_path) == ["first", "second", "two\n\nparagraphs"]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [("a.txt", b" \n", "is empty"), ("a.txt", b"\xff\xfe", "cannot be read"), ("a.bin", b"a", "holds no")],
)
def test_what_is_no_text_is_refused(name: str, content: bytes, said: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(RequestError, match=said):
        read_texts(tmp_path if said == "holds no" else tmp_path / name)
