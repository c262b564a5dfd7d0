"""The bench harness: rows refuse nonsense, files read back, targets mean what they say."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from bench import __main__ as runner
from bench import machine
from bench.harness import ResultFile, Row, Target, measure


def _row(**changes: object) -> Row:
    fields = {"id": "main.load_over_disk", "value": 0.91, "unit": "ratio", "target": ">=0.8"} | changes
    return Row(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "value", "is_met"),
    [
        (">=0.8", 0.8, True),
        (">=0.8", 0.79, False),
        ("<=1.1", 1.1, True),
        ("<= 1e-3", 0.01, False),
        ("==0", 0, True),
        ("==0", 1, False),
    ],
)
def test_target_holds_a_value_to_its_bound(text: str, value: float, is_met: bool) -> None:
    assert Target.parse(text).is_met(value) is is_met


@pytest.mark.parametrize("text", ["", "0.8", ">0.8", "=0", ">=", ">=fast", "about 3"])
def test_target_that_is_no_bound_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="none of '>=NUMBER', '<=NUMBER'"):
        Target.parse(text)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"id": "Load"}, "area.name"),
        ({"value": float("nan")}, "not finite"),
        ({"value": float("inf")}, "not finite"),
        ({"value": "fast"}, "not a number"),
        ({"value": True}, "not a number"),
        ({"unit": None}, "unit None is not text"),
        ({"target": "fast"}, "none of"),
    ],
)
def test_row_refuses(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _row(**changes)


def test_row_without_target_is_neither_met_nor_missed() -> None:
    assert _row(target=None).is_met is None
    assert _row().is_met is True


def test_written_file_reads_back_and_the_last_line_is_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        _row(),
        _row(id="main.rss_over_bank", target="<=1.1", reference="bank: 18.1 GB", note="16 layers"),
    ]
    path = ResultFile.write("load", rows, folder=tmp_path / "results")
    result = ResultFile.read(path)
    assert path.name == "load.json"
    assert result.rows == tuple(rows)
    assert result.machine["cores"] >= 1
    printed = capsys.readouterr().out
    assert "main.load_over_disk" in printed
    assert json.loads(printed.splitlines()[-1]) == json.loads(path.read_text())


def test_rows_of_the_same_commit_stand_beside_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, again, other = _row(value=1), _row(value=2), _row(id="main.other")
    monkeypatch.setenv(machine.COMMIT_VARIABLE, "abc123")
    assert ResultFile.of("load", [first]).beside(tmp_path).rows == (first,), "there is no file yet"
    ResultFile.of("load", [first, other]).save(tmp_path)
    joined = ResultFile.of("load", [again]).beside(tmp_path)
    assert joined.rows == (other, again)
    assert joined.command == machine.command_line(), "the same words once"
    for commit in ("def456", machine.UNKNOWN_COMMIT):
        monkeypatch.setenv(machine.COMMIT_VARIABLE, commit)
        assert ResultFile.of("load", [again]).beside(tmp_path).rows == (again,)


def test_same_id_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="occurs twice"):
        ResultFile.write("load", [_row(), _row()], folder=tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"extra": 1}, "keys are not exactly"),
        ({"bench": "other"}, "not the name of the file"),
        ({"date": "yesterday"}, "yesterday"),
        ({"rows": []}, "no rows"),
        ({"rows": [{"id": "a.b", "value": 1.0, "unit": "s", "speed": 2}]}, "speed"),
    ],
)
def test_file_that_does_not_follow_the_form_is_refused(
    change: dict[str, object], message: str, tmp_path: Path
) -> None:
    path = ResultFile.write("load", [_row()], folder=tmp_path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ValueError, match=message):
        ResultFile.read(path)


def test_measure_gives_the_median_and_synchronizes_around_each_run() -> None:
    events: list[str] = []
    timing = measure(
        lambda: events.append("run"),
        num_runs=3,
        num_warmups=1,
        synchronize=lambda: events.append("wait"),
    )
    assert events == ["run", *["wait", "run", "wait"] * 3]
    assert 0 <= timing.minimum <= timing.median <= timing.maximum
    with pytest.raises(ValueError, match="num_runs is 0"):
        measure(lambda: None, num_runs=0)


def test_commit_comes_from_the_variable_or_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(machine.COMMIT_VARIABLE, "abc123")
    assert machine.git_commit() == "abc123"

    def no_git(*_words: str) -> str:
        raise subprocess.CalledProcessError(128, "git")

    monkeypatch.delenv(machine.COMMIT_VARIABLE)
    monkeypatch.setattr(machine, "_git", no_git)
    assert machine.git_commit() == "unknown"


def test_benches_are_the_modules_that_name_their_device(tmp_path: Path) -> None:
    (tmp_path / "decode.py").write_text('DEVICE = "cuda"\n')
    (tmp_path / "load.py").write_text('DEVICE = "cpu"\n')
    (tmp_path / "harness.py").write_text("ROOT = 1\n")
    assert runner.find_benches(tmp_path) == {"decode": "cuda", "load": "cpu"}
