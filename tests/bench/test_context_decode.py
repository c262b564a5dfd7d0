"""The bench of context lengths runs whole at toy size, and its rows say what was run."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import context_decode
from bench.harness import ResultFile
from bench.sync_counts import SyncCounts

MS = {512: [3.0, 3.2, 3.1], 8192: [3.6, 3.7, 3.8]}


def test_rows_and_targets() -> None:
    rows = context_decode.rows_of(MS, SyncCounts(num_steps=64, elsewhere=130), "48 layers of 64 experts", 48)
    values = {row.id: (row.value, row.target, row.is_met) for row in rows}
    assert values == {
        "graph.ctx8192_over_512": (pytest.approx(3.7 / 3.1), "<=1.25", True),
        "graph.step48_ms": (3.1, "<=3.5", True),
        "graph.host_syncs": (0, "==0", True),
    }
    assert all("48 layers of 64 experts" in row.note for row in rows)
    assert "130 elsewhere" in rows[-1].note


def test_what_was_not_measured_has_no_row() -> None:
    (row,) = context_decode.rows_of({512: MS[512]}, SyncCounts(), "16 layers", 16)
    assert (row.id, row.target) == ("graph.step16_ms", None)
    assert context_decode.rows_of({}, None, "16 layers", 16) == []


def test_bench(
    checkpoint: Path,
    geometry_words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Without CUDA the synchronisations cannot be counted; the other rows are written all the same."""

    def no_cuda(*_: object) -> SyncCounts:
        raise RuntimeError("no CUDA device")

    monkeypatch.setattr(context_decode, "count_syncs", no_cuda)
    words = ["--checkpoint", str(checkpoint), "--device", "cpu", "--results", str(tmp_path)]
    words += ["--lengths", "8", "64", "--tokens", "4", "--runs", "2", *geometry_words]
    assert context_decode.main(words) == 1
    assert "FAILED: synchronisations" in capsys.readouterr().out
    rows = {row.id: row for row in ResultFile.read(tmp_path / "context_decode.json").rows}
    assert set(rows) == {"graph.ctx64_over_8", "graph.step2_ms"}
    assert "2 layers of 16 experts, top-2" in rows["graph.step2_ms"].note
