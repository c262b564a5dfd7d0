"""The bench of step times runs whole on a CPU with made-up device events; a case that fails is left out."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from bench import step_breakdown
from bench.decode_case import Case
from bench.harness import ResultFile
from bench.plots import STEP_KINDS
from bench.step_time import ALL_KINDS
from tests.bench.made_up_profile import MadeUpProfile, event

CASES = (Case("lru", 1.0), Case("lru", 0.45), Case("lru", 0.001))


PROFILE = MadeUpProfile(
    [
        event("cudaGraphLaunch", 0, 5, kind="CPU"),
        event("decode", 0, 500, is_range=True),
        *(
            event(name, 100 * step + begin, 100 * step + end)
            for step in range(16)
            for name, begin, end in (("up_kernel", 0, 30), ("brand_new", 35, 40))
        ),
    ]
)
"""16 steps of one expert kernel and one that nobody knows."""


@pytest.fixture
def words(
    checkpoint: Path,
    routing: Path,
    geometry_words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> list[str]:
    monkeypatch.setattr(step_breakdown, "CASES", CASES)
    monkeypatch.setattr(step_breakdown, "TRACED_CASE", CASES[1])
    monkeypatch.setattr(step_breakdown, "profile", PROFILE)
    words = ["--checkpoint", str(checkpoint), "--routing", str(routing), "--device", "cpu", "--runs", "1"]
    return [*words, "--tokens", "8", "--results", str(tmp_path), *geometry_words]


def test_bench(words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert step_breakdown.main(words) == 1
    assert "FAILED: Case(policy='lru', residency=0.001" in capsys.readouterr().out
    rows = {row.id: row for row in ResultFile.read(tmp_path / "step_breakdown.json").rows}
    assert rows["breakdown.experts_us_all"].value == pytest.approx(30)
    assert rows["breakdown.experts_us_all"].note == "1 kernels and copies a step"
    assert rows["breakdown.other_us_45"].value == pytest.approx(5)
    assert "brand_new" in rows["breakdown.other_us_45"].note
    assert rows["breakdown.idle_us_45"].value == pytest.approx(5)
    assert rows["breakdown.host_us_45"].value == pytest.approx(60 * 15 / 16)
    total = rows["breakdown.total_us_45"]
    assert total.value == pytest.approx(sum(rows[f"breakdown.{kind}_us_45"].value for kind in ALL_KINDS))
    assert "load entropy" in total.note
    assert not any(row_id.endswith("_0") for row_id in rows)
    assert (tmp_path / "step_breakdown.png").read_bytes().startswith(b"\x89PNG")
    trace = json.loads(gzip.decompress((tmp_path / "step_trace.json.gz").read_bytes()))
    assert [e["name"] for e in trace["traceEvents"] if e.get("name") == "decode"] == ["decode"] * 4


def test_trace_that_is_too_large_is_not_kept(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_breakdown, "CASES", CASES[1:2])
    monkeypatch.setattr(step_breakdown, "LARGEST_TRACE", 100)
    assert step_breakdown.main(words) == 0
    assert not list(tmp_path.glob("*.gz"))


def test_picture_has_a_colour_for_every_kind() -> None:
    assert {kind for kind, _, _ in STEP_KINDS} == set(ALL_KINDS)
