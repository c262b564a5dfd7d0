"""The bench of foresight on the bundled model runs, and what it finds is not nonsense."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import bundled_foresight
from bench.harness import ResultFile


def test_rows_of_every_residency(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundled_foresight, "ROUNDS", 1)
    monkeypatch.setattr(bundled_foresight, "RESIDENCIES", {"25": 0.25})
    bundled_foresight.main(["--tokens", "24", "--results", str(tmp_path)])
    rows = {row.id: row for row in ResultFile.read(tmp_path / "bundled_foresight.json").rows}
    assert set(rows) == {
        "foresight.bundled_hit_25",
        "foresight.bundled_over_lru_25",
        "foresight.bundled_minus_sim_25",
    }
    reference = rows["foresight.bundled_hit_25"].reference
    assert reference is not None
    assert rows["foresight.bundled_hit_25"].value > float(reference.removeprefix("LRU "))
    assert rows["foresight.bundled_over_lru_25"].value > 0
    assert rows["foresight.bundled_minus_sim_25"].value < 3
