"""Notices wait for the end of a text, whoever says them, and none is lost."""

from __future__ import annotations

import logging

import pytest

from hetero_runtime.cli.notices import notices_afterwards

LOG = logging.getLogger("hetero_runtime.somewhere")


def test_a_notice_comes_after_the_text(capsys: pytest.CaptureFixture[str]) -> None:
    with notices_afterwards():
        LOG.warning("goes on without %s", "forecasts")
        LOG.info("of no concern")
        assert capsys.readouterr().err == ""
    assert capsys.readouterr().err == "goes on without forecasts\n"


def _break_off() -> None:
    with notices_afterwards():
        LOG.warning("first")
        LOG.error("second")
        raise ValueError("broken off")


def test_an_error_loses_no_notice(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="broken off"):
        _break_off()
    assert capsys.readouterr().err == "first\nsecond\n"


def test_loggers_are_left_as_they_were() -> None:
    before = list(logging.getLogger().handlers)
    with notices_afterwards():
        pass
    assert logging.getLogger().handlers == before
