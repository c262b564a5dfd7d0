"""The benches of loading and decode run at toy size on a CPU and write results of the agreed form."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from bench import disk, eager_decode, load_checkpoint
from bench.decode_case import Case, Plan, measure_case
from bench.harness import ResultFile
from bench.load_rss import LoadMemory
from bench.models.random_checkpoint import ensure_checkpoint
from bench.routing import RecordedRouting
from tests.bench.toy_geometry import TINY

GEOMETRY = replace(TINY, experts=16)
WORDS = [f"--{name.replace('_', '-')}={size}" for name, size in asdict(GEOMETRY).items()]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ensure_checkpoint(tmp_path_factory.mktemp("checkpoint"), GEOMETRY)


@pytest.fixture(scope="module")
def routing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two streams of top-1 of 8: together top-2 of 16."""
    path = tmp_path_factory.mktemp("routing") / "routing.safetensors"
    draw = np.random.default_rng(0)
    RecordedRouting(draw.integers(0, 8, (2, 120, 2, 1)), 8, "random").save(path)
    return path


def test_load_bench(checkpoint: Path, tmp_path: Path) -> None:
    words = ["--checkpoint", str(checkpoint), "--runs", "1", "--results", str(tmp_path), "--each-path"]
    load_checkpoint.main([*words, *WORDS])
    rows = {row.id: row for row in ResultFile.read(tmp_path / "load_checkpoint.json").rows}
    assert rows["main.load_over_disk"].target == ">=0.8"
    assert rows["main.rss_over_bank"].target == "<=1.1"
    assert all(row.value > 0 for row in rows.values())
    assert {"main.load_direct_gb_s", "main.load_buffered_gb_s"} <= set(rows)


def test_memory_is_held_to_the_bank_without_what_was_there_before() -> None:
    assert LoadMemory(bank=100, before=40, peak=145).over_bank == pytest.approx(1.05)


def test_decode_bench(checkpoint: Path, routing: Path, tmp_path: Path) -> None:
    words = ["--checkpoint", str(checkpoint), "--routing", str(routing), "--device", "cpu", "--runs", "1"]
    words += ["--tokens", "8", "--prompt", "12", "--results", str(tmp_path), "--seconds", "0"]
    eager_decode.main([*words, *WORDS])
    rows = {row.id: row for row in ResultFile.read(tmp_path / "eager_decode.json").rows}
    assert {"main.eager_tok_s_45", "main.eager_tok_s_25", "main.eager_tok_s_all"} <= set(rows)
    assert 0 < rows["main.lru_hit_25"].value <= rows["main.lru_hit_45"].value < 100
    assert rows["main.eager_mb_token_25"].value > 0
    assert rows["main.eager_over_resident_45"].value > 0
    assert "load entropy" in rows["main.lru_hit_45"].note
    assert not any("lfu" in row_id for row_id in rows), "an extra policy was begun with no time left"


def test_extra_policies_are_measured_while_there_is_time(checkpoint: Path, routing: Path) -> None:
    plan = Plan(checkpoint, "cpu", tokens=8, prompt=12, runs=1)
    laid = RecordedRouting.load(routing).laid_over(layers=2, experts=16, top_k=2)
    measured = measure_case(plan, Case("lfru", 0.25), laid)
    rows = eager_decode.rows_of(measured, laid, num_experts=16, link_gb_s=50.0)
    assert [row.id for row in rows] == ["main.eager_lfru_tok_s_25", "main.lfru_hit_25"]
    assert rows[0].reference is not None
    assert rows[0].reference.startswith("link: ")


def test_resident_case_moves_nothing(checkpoint: Path, routing: Path) -> None:
    laid = RecordedRouting.load(routing).laid_over(layers=2, experts=16, top_k=2)
    measured = measure_case(Plan(checkpoint, "cpu", tokens=8, prompt=12, runs=1), Case("lru", 1.0), laid)
    assert measured.hit_rate == 1
    assert measured.bytes_token == 0


def test_routing_that_is_too_short_is_refused_before_loading(checkpoint: Path, routing: Path) -> None:
    laid = RecordedRouting.load(routing).laid_over(layers=2, experts=16, top_k=2)
    with pytest.raises(ValueError, match="has 120 tokens, 1048 are needed"):
        measure_case(Plan(checkpoint, "cpu", tokens=972, prompt=12, runs=1), Case("lru", 0.45), laid)


def test_disk_reader_reads_every_byte(tmp_path: Path) -> None:
    file = tmp_path / "some.bin"
    file.write_bytes(bytes(3 * 4096 + 17))
    disk.drop_from_page_cache([file])
    try:
        assert disk.direct_read_gb_s([file], threads=2) > 0
    except OSError as error:
        pytest.skip(f"no direct reads here: {error}")
    assert disk.filesystem_of(tmp_path) != "unknown"
