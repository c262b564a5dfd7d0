"""The bench of three tiers runs whole at toy size, on a graphics card that the CPU plays."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench import gpu_tiers, tier_case
from bench.gpu_tier_rows import Packed, direct_rows, prefetch_rows, unified_rows
from bench.harness import ResultFile, Row
from bench.peak_memory import PeakMemory
from bench.tier_case import Planned, TierCase
from hetero_gpu import mapped
from hetero_runtime import planned
from hetero_runtime.beside_model import beside
from hetero_runtime.config import ResolvedConfig, load_config
from hetero_runtime.expert_file.pack import pack
from hetero_runtime.plan import Gpu, detect
from hetero_runtime.planned import decide
from hetero_runtime.tiers.locate import EXPERTS_SUFFIX
from tests.gpu.fake_mapper import FakeMapper
from tests.runtime.engine.rest import engine_threads


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Mapping[str, Any]]]:
    """A machine with a graphics card that is its CPU; engines run here. Gives their configurations."""
    mapper, configs = FakeMapper(), list[Mapping[str, Any]]()
    gpu = Gpu("a card", 1 << 40, 1 << 40, maps_host_memory=True)
    monkeypatch.setattr(planned, "detect", lambda device: replace(detect("cpu"), gpu=gpu))
    monkeypatch.setattr(ResolvedConfig, "torch_device", "cpu")
    monkeypatch.setattr(mapped, "CudaMapper", lambda: mapper)
    monkeypatch.setattr(tier_case, "LONG_PROMPT", 48)

    def here(model: Path, config: Mapping[str, Any], *, limit_s: float, **options: Any) -> TierCase:
        configs.append(config)
        return TierCase.measure(model, config, **options)

    monkeypatch.setattr(TierCase, "run", here)
    monkeypatch.setattr(gpu_tiers, "pack_beside", pack_here)
    yield configs
    assert mapper.allocated == {}
    assert engine_threads() == []


def pack_here(model: Path) -> Path:
    pack(
        decide(load_config({"model": {"path": str(model)}, "device": "cpu"})).config,
        beside(model, EXPERTS_SUFFIX),
    )
    return beside(model, EXPERTS_SUFFIX)


@pytest.fixture
def words(routing: Path, geometry_words: list[str], tmp_path: Path) -> list[str]:
    named = ["--routing", str(routing), "--folder", str(tmp_path), "--results", str(tmp_path)]
    return [*named, "--tokens", "3", "--factor", "2", *geometry_words]


def rows_in(folder: Path) -> dict[str, Row]:
    return {row.id: row for row in ResultFile.read(folder / "gpu_tiers.json").rows}


def test_all_parts(card: list[Mapping[str, Any]], words: list[str], tmp_path: Path) -> None:
    assert gpu_tiers.main(words) == 0
    rows = rows_in(tmp_path)
    of_tiers = ("tok_s", "slab_hit", "rss_over_plan", "vram_over_plan")
    of_disks = ("host_hit", "disk_gb_s", "disk_share", "same_tokens")
    of_unified = ("tok_s", "rss_over_experts", "memory_over_experts", "same_tokens")
    assert set(rows) == {
        *(f"tiers.gpu_ram_{name}" for name in of_tiers),
        *(f"tiers.gpu_{share}_{name}" for share in ("50", "25") for name in (*of_tiers, *of_disks)),
        *("tiers.gpu_seqmoe_vs_lru", "tiers.gpu_seqmoe_same_tokens"),
        *(f"unified.{name}_{what}" for name in ("ram", "direct") for what in of_unified),
    }
    assert all(row.is_met for row in rows.values() if row.id.endswith("same_tokens"))
    assert rows["tiers.gpu_50_host_hit"].value > rows["tiers.gpu_25_host_hit"].value >= 0
    assert rows["tiers.gpu_50_disk_gb_s"].value > 0
    assert [config["memory"].get("host_slabs") for config in card[:3]] == [None, 16, 8]
    assert [config["device"] for config in card] == ["cuda"] * 3 + ["unified"] * 2 + ["cuda"] * 2
    assert [config["preset"] for config in card] == ["lru"] * 6 + ["seqmoe"]


def test_a_part_that_fails_costs_its_own_rows(
    card: list[Mapping[str, Any]], words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Packed.run

    def failing(model: Packed, memory: dict[str, Any], **options: Any) -> TierCase:
        if memory["backing"] == "ram":
            raise RuntimeError("the link is down")
        return run(model, memory, **options)

    monkeypatch.setattr(Packed, "run", failing)
    assert gpu_tiers.main([*words, "--parts", "tiers"]) == 1
    rows = rows_in(tmp_path)
    assert "tiers.gpu_25_tok_s" in rows
    assert not any("gpu_ram" in name or "same_tokens" in name for name in rows)


def case(tok_s: float, text: int = 7) -> TierCase:
    return TierCase(
        [text],
        tok_s,
        0.5,
        10**9,
        prompt_read_gb_s=1.0,
        slabs=8,
        host_hit_rate=0.25,
        disk_bytes=10**9,
        disk_gb_s=1.5,
        peak=PeakMemory(rss=110, machine=300, device=90),
        planned=Planned(host=100, device=100, experts=200),
    )


def test_rows_stand_beside_what_bounds_them() -> None:
    model = Packed(Path("model"), 32, 2.0, None, "a model")
    rows = [
        *direct_rows("50", case(5.0), case(10.0), model),
        *prefetch_rows(case(5.0), case(6.0, text=8), model),
        *unified_rows("ram", case(20.0), case(10.0), model),
        *unified_rows("direct", case(20.0), None, model),
    ]
    found = {row.id: row.value for row in rows}
    assert found["tiers.gpu_50_disk_share"] == 0.5
    assert found["tiers.gpu_50_rss_over_plan"] == 1.1
    assert found["tiers.gpu_50_same_tokens"] == 1
    assert found["tiers.gpu_seqmoe_vs_lru"] == 1.2
    assert found["tiers.gpu_seqmoe_same_tokens"] == 0
    assert found["unified.ram_rss_over_experts"] == 0.55
    assert found["unified.direct_memory_over_experts"] == 3.0
    assert "unified.direct_same_tokens" not in found
    assert "10 tok/s" in str({row.id: row.reference for row in rows}["unified.ram_tok_s"])
