"""Findings for a reader (a table) and for a program (JSON)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from hetero_runtime.doctor.base import Finding, Status

if TYPE_CHECKING:
    from rich.console import Console

_COLOURS: dict[Status, str] = {"ok": "green", "warn": "yellow", "bad": "red", "absent": "dim"}


def to_json(findings: Sequence[Finding]) -> str:
    """One JSON object: `findings`, a list with the fields of `Finding`, and `counts` by status."""
    counts = {status: sum(one.status == status for one in findings) for status in _COLOURS}
    return json.dumps({"findings": [asdict(one) for one in findings], "counts": counts})


def print_table(findings: Sequence[Finding], console: Console) -> None:
    """A row a finding: name, value with unit, status, meaning."""
    from rich.table import Table
    from rich.text import Text

    table = Table(show_edge=False, pad_edge=False)
    table.add_column("what", no_wrap=True)
    table.add_column("value", justify="right")
    table.add_column("status")
    table.add_column("what it means here", ratio=1)
    for one in findings:
        status = Text(one.status, style=_COLOURS[one.status])
        table.add_row(one.name, Text(value_text(one)), status, Text(one.meaning))
    console.print(table)


def value_text(finding: Finding) -> str:
    """The value as a reader wants it: `yes`, `49.2 GB/s`, `–`."""
    if finding.value is None:
        return "–"
    if isinstance(finding.value, bool):
        return "yes" if finding.value else "no"
    return f"{finding.value} {finding.unit}".strip()
