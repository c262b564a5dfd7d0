"""A preset's waits become its row, and a preset that fails leaves the others theirs."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import host_syncs
from bench.harness import ResultFile
from bench.sync_counts import SyncCounts


def test_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def count(preset: str, *, tokens: int) -> SyncCounts:
        if preset == "seqmoe":
            raise RuntimeError("no CUDA device")
        return SyncCounts(num_steps=tokens, in_submissions=2 * (preset == "psr"), elsewhere=9)

    monkeypatch.setattr(host_syncs, "count_syncs", count)
    assert host_syncs.main(["--tokens", "5", "--results", str(tmp_path)]) == 1
    assert "FAILED: seqmoe" in capsys.readouterr().out
    rows = ResultFile.read(tmp_path / "host_syncs.json").rows
    assert [(row.id, row.value, row.is_met) for row in rows] == [
        ("graph.host_syncs", 0, True),
        ("graph.host_syncs_psr", 2, False),
    ]
    assert "while 5 steps are submitted, sampling included; 9 elsewhere" in rows[0].note
