"""The progress bar: bytes, speed and time left on a terminal, silence elsewhere."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from hetero_runtime.cli.progress import BytesProgress, count_progress


def _draw(*, is_terminal: bool) -> str:
    console = Console(file=io.StringIO(), force_terminal=is_terminal, width=120)
    with BytesProgress("experts", then="capturing", console=console) as progress:
        progress(500_000_000, 1_000_000_000)
        progress(1_000_000_000, 1_000_000_000)
        progress(1_000_000_000, 1_000_000_000)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_terminal_sees_bytes_and_time_left() -> None:
    text = _draw(is_terminal=True)
    assert "experts" in text
    assert "1.0/1.0 GB" in text
    assert "left" in text


def test_a_pipe_sees_nothing() -> None:
    assert _draw(is_terminal=False) == ""


def test_what_goes_on_after_the_last_byte_is_said_once() -> None:
    text = _draw(is_terminal=True)
    assert text.count("capturing") == 1


def test_things_counted_are_silent_in_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    with count_progress("tokens") as seen:
        seen(3, 10)
    assert capsys.readouterr() == ("", "")
