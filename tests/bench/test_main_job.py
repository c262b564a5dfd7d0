"""The benches of loading and decode run at toy size on a CPU and write results of the agreed form."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import decode_case, disk, eager_decode, load_checkpoint
from bench.decode_case import Case, Plan, measure_case
from bench.harness import ResultFile
from bench.load_rss import LoadMemory
from bench.routing import RecordedRouting
from hetero_runtime.source import config_from


def test_load_bench(checkpoint: Path, geometry_words: list[str], tmp_path: Path) -> None:
    words = ["--checkpoint", str(checkpoint), "--runs", "1", "--results", str(tmp_path), "--each-path"]
    load_checkpoint.main([*words, *geometry_words])
    rows = {row.id: row for row in ResultFile.read(tmp_path / "load_checkpoint.json").rows}
    assert rows["main.load_over_disk"].target == ">=0.8"
    assert rows["main.rss_over_bank"].target == "<=1.1"
    assert all(row.value > 0 for row in rows.values())
    assert {"main.load_direct_gb_s", "main.load_buffered_gb_s"} <= set(rows)


def test_memory_is_held_to_the_bank_without_what_was_there_before() -> None:
    assert LoadMemory(bank=100, before=40, peak=145).over_bank == pytest.approx(1.05)


def test_decode_bench(checkpoint: Path, routing: Path, geometry_words: list[str], tmp_path: Path) -> None:
    words = ["--checkpoint", str(checkpoint), "--routing", str(routing), "--device", "cpu", "--runs", "1"]
    words += ["--tokens", "8", "--prompts", "12", "--results", str(tmp_path), "--seconds", "0"]
    eager_decode.main([*words, *geometry_words])
    rows = {row.id: row for row in ResultFile.read(tmp_path / "eager_decode.json").rows}
    assert {"main.eager_tok_s_45", "main.eager_tok_s_25", "main.eager_tok_s_all"} <= set(rows)
    assert 0 < rows["main.lru_hit_25"].value <= rows["main.lru_hit_45"].value < 100
    assert rows["main.eager_mb_token_25"].value > 0
    assert rows["main.eager_over_resident_45"].value > 0
    assert "load entropy" in rows["main.lru_hit_45"].note
    assert not any("lfu" in row_id for row_id in rows), "an extra policy was begun with no time left"


def test_extra_policies_are_measured_while_there_is_time(checkpoint: Path, routing: Path) -> None:
    plan = Plan(checkpoint, "cpu", tokens=8, prompts=(12,), runs=1)
    laid = RecordedRouting.load(routing).laid_over(layers=2, experts=16, top_k=2)
    measured = measure_case(plan, Case("lfru", 0.25), laid)
    rows = eager_decode.rows_of(measured, laid, num_experts=16, link_gb_s=50.0)
    assert [row.id for row in rows] == ["main.eager_lfru_tok_s_25", "main.lfru_hit_25"]
    assert rows[0].reference is not None
    assert rows[0].reference.startswith("link: ")


def test_resident_case_moves_nothing(checkpoint: Path, routing: Path) -> None:
    laid = RecordedRouting.load(routing).laid_over(layers=2, experts=16, top_k=2)
    measured = measure_case(Plan(checkpoint, "cpu", tokens=8, prompts=(12,), runs=1), Case("lru", 1.0), laid)
    assert measured.hit_rate == 1
    assert measured.bytes_token == 0


def test_routing_that_is_too_short_is_refused_before_loading(checkpoint: Path, routing: Path) -> None:
    laid = RecordedRouting.load(routing).laid_over(layers=2, experts=16, top_k=2)
    with pytest.raises(ValueError, match="has 120 tokens, 1036 are needed"):
        measure_case(Plan(checkpoint, "cpu", tokens=972, prompts=(12,), runs=1), Case("lru", 0.45), laid)


def test_times_to_the_first_token_by_length_without_the_first_pass(checkpoint: Path) -> None:
    plan = Plan(checkpoint, "cpu", tokens=4, prompts=(5, 40), runs=2)
    measured = measure_case(plan, Case("lru", 0.45), None)
    assert {length: len(each) for length, each in measured.ttfts_ms.items()} == {5: 2, 40: 2}
    assert min(measured.ttfts_ms[5]) <= measured.ttft_ms(5) <= max(measured.ttfts_ms[5])
    assert measured.slabs == round(0.45 * 2 * 16)
    assert measured.start_s is None, "an eager engine captures nothing"


def test_engine_that_was_to_be_captured_and_is_not_is_no_result(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine without CUDA the configuration refuses already; let it pass, and have capturing refuse."""
    plan = Plan(checkpoint, "cpu", tokens=4, prompts=(), runs=1)
    eager = config_from

    def not_graph(source: object, overrides: dict[str, dict[str, object]]) -> object:
        return eager(source, overrides | {"execution": overrides["execution"] | {"mode": "eager"}})

    monkeypatch.setattr(decode_case, "config_from", not_graph)
    with pytest.raises(RuntimeError, match="was to be captured and is not"):
        measure_case(plan, Case("lru", 0.45, "graph"), None)


def test_disk_reader_reads_every_byte(tmp_path: Path) -> None:
    file = tmp_path / "some.bin"
    file.write_bytes(bytes(3 * 4096 + 17))
    disk.drop_from_page_cache([file])
    try:
        assert disk.direct_read_gb_s([file], threads=2) > 0
    except OSError as error:
        pytest.skip(f"no direct reads here: {error}")
    assert disk.filesystem_of(tmp_path) != "unknown"
