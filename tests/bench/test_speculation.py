"""The bench of speculation runs, and its figures belong together."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import speculation
from bench.harness import ResultFile


def test_it_measures_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speculation, "TEXTS", {"repetitive": speculation.REPETITIVE[:1]})
    speculation.main(["--tokens", "24", "--rounds", "1", "--results", str(tmp_path)])
    rows = {row.id: row for row in ResultFile.read(tmp_path / "speculation.json").rows}
    assert set(rows) - {"psr.spec_speedup"} == {
        f"speculation.{name}_{what}_repetitive"
        for name in ("lookup_exact", "lookup_blocks", "block_exact", "block_blocks", "network_exact")
        for what in ("tau", "copies", "ms", "equal")
    }
    for drafter in ("lookup", "block", "network"):
        assert rows[f"speculation.{drafter}_exact_equal_repetitive"].value == 1
        assert rows[f"speculation.{drafter}_exact_tau_repetitive"].value >= 1
        assert rows[f"speculation.{drafter}_exact_copies_repetitive"].value > 0
    assert rows["speculation.lookup_exact_tau_repetitive"].value > 1
    assert rows["psr.spec_speedup"].value > 0
