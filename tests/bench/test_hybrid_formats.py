"""The bench of handlers by format: it runs whole, and its rows say what was measured."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bench import hybrid_formats
from bench.harness import ResultFile
from bench.hybrid_formats import Engines, Speeds, main, rows_of
from bench.models.random_checkpoint import ensure_checkpoint
from tests.bench.toy_geometry import TINY

WORDS = ["--tokens", "4", "--runs", "1", "--residencies", "0.5"]


def test_all_handlers_of_every_format_are_measured(tmp_path: Path) -> None:
    checkpoint = str(ensure_checkpoint(tmp_path / "model", TINY))
    assert main(["--checkpoint", checkpoint, "--results", str(tmp_path), *WORDS]) == 0
    rows = {row.id: row for row in ResultFile.read(tmp_path / "hybrid_formats.json").rows}
    assert {f"cpu.hybrid_tok_s_{name}_50" for name in ("bf16", "int8", "int4", "fp8")} < set(rows)
    assert rows["cpu.hybrid_over_best"].value > 0
    assert "the least of 4 cases" in str(rows["cpu.hybrid_over_best"].reference)
    assert re.search(
        r"load: hits \d+ %; cpu: hits .* on the CPU in \d+ us each", rows["cpu.hybrid_tok_s_int4_50"].note
    )


def test_a_case_that_fails_leaves_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = Engines.speeds

    def speeds(engines: Engines, name: str, residency: float) -> Speeds:
        if name == "int8":
            raise RuntimeError("no int8 today")
        return measured(engines, name, residency)

    monkeypatch.setattr(Engines, "speeds", speeds)
    checkpoint = str(ensure_checkpoint(tmp_path / "model", TINY))
    words = ["--checkpoint", checkpoint, "--results", str(tmp_path), "--formats", "int8", "int4", *WORDS]
    assert main(words) == 1
    ids = [row.id for row in ResultFile.read(tmp_path / "hybrid_formats.json").rows]
    assert "cpu.hybrid_tok_s_int4_50" in ids
    assert "cpu.hybrid_tok_s_int8_50" not in ids


def test_no_case_is_begun_after_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(engines: Engines, name: str, residency: float) -> Speeds:
        raise AssertionError("begun")

    monkeypatch.setattr(hybrid_formats.Engines, "speeds", never)
    assert main(["--seconds", "-1", "--results", str(tmp_path)]) == 0
    assert not list(tmp_path.iterdir())


def test_the_even_case_has_a_row_of_its_own() -> None:
    far, near = Speeds("int8", 0.25, 10.0, 30.0, 33.0), Speeds("checkpoint", 0.25, 10.0, 9.0, 14.0)
    more_resident = Speeds("checkpoint", 0.45, 10.0, 10.0, 12.0)
    rows = {row.id: row for row in rows_of([far, near, more_resident], "a note")}
    assert rows["cpu.hybrid_over_best"].value == 1.1
    assert rows["cpu.hybrid_over_best_balanced"].value == 1.4
    assert "load 10, cpu 9, hybrid 14" in str(rows["cpu.hybrid_over_best_balanced"].reference)
    assert "cpu.hybrid_over_best_balanced" not in {row.id for row in rows_of([far], "a note")}


def test_what_a_killed_run_had_measured_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def speeds(engines: Engines, name: str, residency: float) -> Speeds:
        if name == "int4":
            raise KeyboardInterrupt
        return Speeds(name, residency, 2.0, 1.0, 3.0, "what it did")

    monkeypatch.setattr(Engines, "speeds", speeds)
    with pytest.raises(KeyboardInterrupt):
        main(["--formats", "int8", "int4", "--residencies", "0.5", "--results", str(tmp_path)])
    rows = {row.id: row for row in ResultFile.read(tmp_path / "hybrid_formats.json").rows}
    assert rows["cpu.hybrid_over_best"].value == 1.5
    assert rows["cpu.hybrid_tok_s_int8_50"].note.endswith("what it did")
