"""The bench of misses on the CPU: one engine measured, and rows from what engines gave."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from bench import hybrid_misses
from bench.harness import ResultFile
from bench.hybrid_misses import Engine, main, rows_of


def test_one_engine_is_measured_and_printed(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--handler", "cpu", "--residency", "0.25", "--tokens", "4", "--runs", "2"])
    engine = Engine(**json.loads(capsys.readouterr().out.splitlines()[-1]))
    assert (engine.handler, engine.residency) == ("cpu", 0.25)
    assert len(engine.all_tok_s) == 2
    assert min(engine.all_tok_s) > 0
    assert engine.peak_rss_bytes > 50e6
    assert engine.load_s > 0
    assert engine.start_s is None


def test_rows_compare_hybrid_with_the_better_of_both() -> None:
    speeds = {
        ("load", 0.25): [10.0, 12.0],
        ("cpu", 0.25): [20.0, 20.0],
        ("hybrid", 0.25): [19.0, 23.0],
        ("load", 0.45): [40.0],
        ("cpu", 0.45): [30.0],
        ("hybrid", 0.45): [36.0],
    }
    peaks = {"load": 600_000_000, "cpu": 690_000_000, "hybrid": 700_000_000}
    engines = [Engine(name, share, tok_s, peaks[name]) for (name, share), tok_s in speeds.items()]
    rows = {row.id: row for row in rows_of(engines, "a note")}
    assert set(rows) == {
        "cpu.hybrid_over_best",
        "cpu.hybrid_tok_s_25",
        "cpu.hybrid_tok_s_45",
        "cpu.rss_extra_mb",
    }
    assert rows["cpu.hybrid_over_best"].value == 36 / 40
    assert not rows["cpu.hybrid_over_best"].is_met
    assert rows["cpu.hybrid_tok_s_25"].value == 21.0
    assert rows["cpu.hybrid_tok_s_25"].reference == "load 11, cpu 20 tok/s, same run"
    assert rows["cpu.rss_extra_mb"].value == 100
    assert rows["cpu.rss_extra_mb"].is_met


def test_memory_alone_takes_two_processes_and_gives_one_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def measured(options: argparse.Namespace, handler: str, residency: float) -> Engine:
        asked.append((handler, residency))
        return Engine(handler, residency, [1.0], 300_000_000 if handler == "load" else 420_000_000)

    monkeypatch.setattr(hybrid_misses, "measure_apart", measured)
    words = ["--handlers", "load", "hybrid", "--residencies", "0.25", "--rounds", "1"]
    assert main([*words, "--results", str(tmp_path)]) == 0
    assert asked == [("load", 0.25), ("hybrid", 0.25)]
    (row,) = ResultFile.read(tmp_path / "hybrid_misses.json").rows
    assert (row.id, row.value) == ("cpu.rss_extra_mb", 120)


def test_rows_are_written_as_they_come_and_a_process_that_fails_leaves_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured(options: argparse.Namespace, handler: str, residency: float) -> Engine:
        if residency == 0.45 and handler == "cpu":
            raise RuntimeError("no CPU today")
        if residency == 0.45 and handler == "hybrid":
            raise KeyboardInterrupt
        return Engine(handler, residency, [2.0], 300_000_000)

    monkeypatch.setattr(hybrid_misses, "measure_apart", measured)
    with pytest.raises(KeyboardInterrupt):
        main(["--rounds", "1", "--results", str(tmp_path)])
    ids = {row.id for row in ResultFile.read(tmp_path / "hybrid_misses.json").rows}
    assert ids == {"cpu.hybrid_over_best", "cpu.hybrid_tok_s_25", "cpu.rss_extra_mb"}
    assert main(["--rounds", "1", "--residencies", "0.45", "--handlers", "cpu", "load"]) == 1
