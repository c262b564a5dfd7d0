"""The bench of CPU experts runs whole on a small bank, and times nothing that is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import cpu_experts
from bench.harness import ResultFile


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"HIDDEN": 128, "INTERMEDIATE": 64, "BANK_BYTES": 1 << 20, "ROUNDS": 2, "CALLS": 2}
    for name, size in sizes.items():
        monkeypatch.setattr(cpu_experts, name, size)
    monkeypatch.setattr(cpu_experts, "MANY_TOKENS", (9,))
    monkeypatch.setattr(cpu_experts, "best_reader_gb_s", lambda cpus: 10.0)


def test_rows_of_a_machine_have_its_name(tmp_path: Path) -> None:
    words = ["--formats", "bf16", "int4", "--machine", "here", "--results", str(tmp_path)]
    assert cpu_experts.main(words) == 0
    rows = {row.id: row for row in ResultFile.read(tmp_path / "cpu_experts_here.json").rows}
    assert set(rows) == {
        "cpu_here.bw_share_bf16",
        "cpu_here.q9_bf16_gflops",
        "cpu_here.vs_torch_q1",
        "cpu_here.bw_share_int4",
        "cpu_here.q9_int4_gflops",
    }
    assert all(row.value > 0 for row in rows.values())
    assert "worker" in rows["cpu_here.bw_share_int4"].note


def test_what_computes_something_else_is_not_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_experts, "relative_error", lambda out, reference: 1.0)
    assert cpu_experts.main(["--formats", "int8", "--results", str(tmp_path)]) == 1
    assert not list(tmp_path.iterdir())
