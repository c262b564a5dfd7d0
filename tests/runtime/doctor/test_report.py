"""The table, the JSON and the command."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from hetero_runtime import doctor
from hetero_runtime.cli.doctor import doctor_command
from hetero_runtime.doctor import Finding
from hetero_runtime.doctor.report import print_table, to_json, value_text

FINDINGS = [
    Finding("link, pinned", 49.2, "GB/s", "ok", "an expert of 9.4 MB takes 0.19 ms over this link"),
    Finding("ISA amx_bf16", False, "", "absent", "no tiles [here]"),
    Finding("gpu", None, "", "bad", "this check failed"),
]


def test_values_read_well() -> None:
    assert [value_text(one) for one in FINDINGS] == ["49.2 GB/s", "no", "–"]


def test_the_table_shows_every_finding_and_takes_no_brackets_for_markup() -> None:
    console = Console(file=io.StringIO(), width=120)
    print_table(FINDINGS, console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    for part in ("49.2 GB/s", "0.19 ms over this link", "no tiles [here]", "bad"):
        assert part in text


def test_json_has_the_fields_and_the_counts() -> None:
    report = json.loads(to_json(FINDINGS))
    assert report["findings"][0] == {
        "name": "link, pinned",
        "value": 49.2,
        "unit": "GB/s",
        "status": "ok",
        "meaning": "an expert of 9.4 MB takes 0.19 ms over this link",
    }
    assert report["counts"] == {"ok": 1, "warn": 0, "bad": 1, "absent": 1}


@pytest.fixture
def app() -> typer.Typer:
    app = typer.Typer()
    app.command()(doctor_command)
    return app


def test_the_command_prints_json_alone(
    app: typer.Typer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "examine", lambda path, on_start: FINDINGS)
    result = CliRunner().invoke(app, [str(tmp_path), "--json"])
    assert result.exit_code == 0, result.output
    (line,) = result.stdout.splitlines()
    assert json.loads(line)["findings"][2]["status"] == "bad"


def test_the_command_prints_a_table(app: typer.Typer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "examine", lambda path, on_start: FINDINGS)
    result = CliRunner().invoke(app, [])
    assert result.exit_code == 0, result.output
    assert "what it means" in result.stdout


def test_a_path_that_does_not_exist_is_named(app: typer.Typer, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, [str(tmp_path / "gone")])
    assert result.exit_code == 2
    assert "does not exist" in result.output
