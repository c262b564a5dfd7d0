"""The trace of a run is a file that trace viewers open; a path that cannot be written is refused first."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from hetero_runtime.cli import app
from hetero_runtime.cli.options import recording_to
from hetero_runtime.errors import ConfigError
from hetero_runtime.profiling import mark_stall, span, trace_to

CPU = ("run", "--set", "device=cpu", "--set", "execution.max_length=256", "--temperature", "0")


def ranges(text: str | bytes) -> list[str]:
    """Names of the ranges of a trace, in the order of their beginnings."""
    events = [event for event in json.loads(text)["traceEvents"] if event.get("cat") == "user_annotation"]
    return [event["name"] for event in sorted(events, key=lambda event: event["ts"])]


def test_ranges_stalls_and_operators_are_in_the_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with trace_to(path):
        with span("prefill"):
            torch.ones(3, 3) @ torch.ones(3, 3)
        mark_stall(0.0)
        mark_stall(0.0125)
    assert ranges(path.read_text()) == ["prefill", "stalled 12.50 ms"]
    assert "aten::matmul" in path.read_text()


def test_trace_is_written_when_the_run_fails(tmp_path: Path) -> None:
    path = tmp_path / "trace.json.gz"
    with pytest.raises(KeyboardInterrupt), trace_to(path), span("decode"):
        raise KeyboardInterrupt
    assert ranges(gzip.decompress(path.read_bytes())) == ["decode"]


def test_spans_outside_of_a_recording_record_nothing() -> None:
    with recording_to(None), span("decode"):
        assert not torch.autograd._profiler_enabled()


@pytest.mark.parametrize(
    ("name", "message"),
    [("no/folder/trace.json", "No such file"), ("trace.txt", "is a .json or"), ("folder.json", "directory")],
)
def test_path_that_cannot_be_written_is_refused_at_once(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "folder.json").mkdir()
    with pytest.raises(ConfigError, match=f"--profile .*{message}"):
        trace_to(tmp_path / name)


def test_asking_whether_a_path_can_be_written_changes_nothing(tmp_path: Path) -> None:
    old = tmp_path / "old.json"
    old.write_text("kept")
    trace_to(old)
    trace_to(tmp_path / "new.json")
    assert [path.name for path in tmp_path.iterdir()] == ["old.json"]
    assert old.read_text() == "kept"


def test_run_records_each_pass(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    result = CliRunner().invoke(app, [*CPU, "--max-tokens", "4", "--profile", str(path)])
    assert result.exit_code == 0, result.output
    passes = [name for name in ranges(path.read_text()) if not name.startswith("stalled")]
    assert passes == ["prefill", "decode", "decode", "decode"]


def test_run_refuses_the_path_before_it_loads(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, [*CPU, "--profile", str(tmp_path / "no" / "trace.json")])
    assert result.exit_code == 2
    assert result.stderr.startswith("error: --profile")
    assert "Once upon" not in result.stdout
