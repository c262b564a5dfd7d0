"""The exactness bench on one architecture."""

from __future__ import annotations

from pathlib import Path

from bench.exactness import main
from bench.harness import ResultFile


def test_one_architecture_is_exact(tmp_path: Path) -> None:
    main(["Mixtral", "--results", str(tmp_path)])
    (row,) = ResultFile.read(tmp_path / "exactness.json").rows
    assert (row.id, row.value, row.is_met) == ("exact.mixtral_cpu", 0.0, True)
    assert "384 tokens equal" in row.note
