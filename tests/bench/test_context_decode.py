"""The bench of context lengths runs whole at toy size, and its rows say what was run."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import context_decode
from bench.harness import ResultFile

MS = {512: [3.0, 3.2, 3.1], 8192: [3.6, 3.7, 3.8]}


def test_rows_and_targets() -> None:
    rows = context_decode.rows_of(MS, "48 layers of 64 experts", 48)
    values = {row.id: (row.value, row.target, row.is_met) for row in rows}
    assert values == {
        "graph.ctx8192_over_512": (pytest.approx(3.7 / 3.1), "<=1.25", True),
        "graph.step48_ms": (3.1, "<=3.5", True),
    }
    assert all("48 layers of 64 experts" in row.note for row in rows)


def test_what_was_not_measured_has_no_row() -> None:
    (row,) = context_decode.rows_of({512: MS[512]}, "16 layers", 16)
    assert (row.id, row.target) == ("graph.step16_ms", None)
    assert context_decode.rows_of({}, "16 layers", 16) == []


def test_bench(checkpoint: Path, geometry_words: list[str], tmp_path: Path) -> None:
    words = ["--checkpoint", str(checkpoint), "--device", "cpu", "--results", str(tmp_path)]
    words += ["--lengths", "8", "64", "--tokens", "4", "--runs", "2", *geometry_words]
    assert context_decode.main(words) == 0
    rows = {row.id: row for row in ResultFile.read(tmp_path / "context_decode.json").rows}
    assert set(rows) == {"graph.ctx64_over_8", "graph.step2_ms"}
    assert "2 layers of 16 experts, top-2" in rows["graph.step2_ms"].note
