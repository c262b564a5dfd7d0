"""Run one check so that its failure is a line of the report and not the end of it."""

from __future__ import annotations

from pathlib import Path

from hetero_runtime.doctor.base import Check, Finding


def run_check(name: str, check: Check, folder: Path) -> list[Finding]:
    """The findings of `check`, or one `bad` finding that carries the exception."""
    try:
        return check(folder)
    except Exception as error:  # a broken driver may raise anything; the report shows it
        text = f"{type(error).__name__}: {error}"
        return [Finding(name, None, "", "bad", f"this check failed, the others stand: {text}")]
