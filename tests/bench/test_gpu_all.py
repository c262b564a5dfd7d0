"""One command for a GPU machine: parts that fail leave the others alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.gpu_all import Part, parts_of, print_results, run
from bench.harness import ResultFile, Row


def test_failed_part_takes_along_only_what_needs_it(capfd: pytest.CaptureFixture[str]) -> None:
    parts = [
        Part("bad", ("no_such_module",), 30),
        Part("after", ("this",), 30, needs=("bad",)),
        Part("good", ("timeit", "-n1", "-r1"), 30),
    ]
    assert run(parts) == ["bad: exit status 1", "after: needs bad"]
    assert "=== good: " in capfd.readouterr().out


def test_part_that_hangs_is_ended() -> None:
    assert run([Part("slow", ("timeit", "-n1", "-r1", "__import__('time').sleep(60)"), 0.5)]) == [
        "slow: took longer than 0 s"
    ]


def test_parts_name_modules_and_parts_that_exist() -> None:
    parts = parts_of(Path("out"), Path("corpus"), Path("work"), 16, site=Path("site"))
    root = Path(__file__).resolve().parents[2]
    names = [part.name for part in parts]
    for i, part in enumerate(parts):
        assert (root / f"{part.words[0].replace('.', '/')}.py").is_file()
        assert set(part.needs) <= set(names[:i])
    without = parts_of(Path("out"), Path("corpus"), Path("work"), 16)
    assert [part.name for part in without] == names[:-1]
    assert names[-1] == "freetoken"


def test_results_are_printed_one_row_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [Row(id="main.load_over_disk", value=0.7, unit="ratio", target=">=0.8", reference="disk: 2 GB/s")]
    ResultFile.write("load_checkpoint", rows, folder=tmp_path)
    capsys.readouterr()
    print_results(tmp_path)
    head, line = capsys.readouterr().out.splitlines()
    assert head.startswith("--- load_checkpoint")
    assert line.split() == [
        "main.load_over_disk",
        "0.7",
        "ratio",
        ">=0.8",
        "NOT",
        "MET",
        "disk:",
        "2",
        "GB/s",
    ]
