"""The CPU bench at toy size."""

from __future__ import annotations

from pathlib import Path

from bench.bundled_decode import main
from bench.harness import ResultFile


def test_bench_writes_ratios_and_hit_rates(tmp_path: Path) -> None:
    main(["--tokens", "4", "--results", str(tmp_path)])
    rows = {row.id: row.value for row in ResultFile.read(tmp_path / "bundled_decode.json").rows}
    assert set(rows) >= {"bundled.over_plain_25", "bundled.lru_hit_25", "bundled.lfru_hit_45"}
    assert all(0 < value <= 100 for name, value in rows.items() if "_hit_" in name)
    assert all(value > 0 for value in rows.values())
