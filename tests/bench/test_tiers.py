"""The parts of the bench of tiers: a model that says the same with larger experts, cases, limits, rows."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from bench import tier_case
from bench.memory_limit import V1, V2, LimitedGroup
from bench.tier_case import Start, TierCase
from bench.tiers import Limited, rows_of
from bench.widened import write_widened
from hetero_runtime.engine import Engine
from hetero_runtime.plan import read_geometry


@pytest.fixture(scope="module")
def widened(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_widened(tmp_path_factory.mktemp("widened") / "model", 3)


def test_widened_experts_are_larger_and_say_the_same(widened: Path) -> None:
    assert read_geometry(widened).moe_intermediate_size == 120
    said = []
    for model in (None, str(widened)):
        with Engine.load({"model": {"path": model}, "preset": "seqmoe", "device": "cpu"}) as engine:
            said.append(engine.generate("Once upon a time", max_tokens=24, ignore_eos=True).token_ids)
    assert said[0] == said[1]


def test_a_case_counts_what_its_engine_did(widened: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_case, "LONG_PROMPT", 32)
    monkeypatch.setattr(tier_case, "PROMPTS", ("Once upon a time",))
    config = {"device": "cpu", "memory": {"residency": 0.25}, "execution": {"max_rows": 1}}
    case = TierCase.measure(widened, config, tokens=6)
    assert len(case.text) == 6
    assert case.slabs == 128
    assert case.prompt_read_gb_s == 0
    assert 0 < case.hit_rate < 1
    assert case.read_bytes > 0
    assert case.start.needed > 10**6


@pytest.mark.parametrize(
    ("files", "events"),
    [(V1, "oom_kill_disable 0\nunder_oom 0\noom_kill 2"), (V2, "low 0\noom 3\noom_kill 2")],
)
def test_a_group_tells_its_peak_and_its_victims(tmp_path: Path, files: Any, events: str) -> None:
    group = LimitedGroup(tmp_path / "group", files, 1 << 20)
    assert (group.folder / files.limit).read_text() == "1048576"
    (group.folder / files.peak).write_text("1000\n")
    (group.folder / files.events).write_text(events + "\n")
    group.join()
    assert (group.folder / "cgroup.procs").read_text() == str(os.getpid())
    assert (group.peak_bytes, group.num_killed) == (1000, 2)


def case(tok_s: float, text: int = 7) -> TierCase:
    return TierCase([text], tok_s, 0.5, 10**9, 0.9, 128, start=Start(102, 100))


def test_rows_compare_backings_and_refuse_different_words() -> None:
    free = {"ram": case(20.0), "lru": case(8.0), "seqmoe": case(10.0)}
    bound = {
        "direct": Limited(case(6.0), 0.9),
        "mmap": Limited(case(3.0), 1.0),
        "swap": Limited(case(1.0), 0.8),
    }
    rows = {row.id: row for row in rows_of(free, bound, disk_gb_s=1.0, over_limit=4.2)}
    assert {name: row.value for name, row in rows.items()} == {
        "tier.direct_vs_swap": 6.0,
        "tier.direct_vs_mmap": 2.0,
        "tier.disk_share": 0.9,
        "tier.seqmoe_vs_lru": 1.25,
        "tier.peak_over_limit": 1.0,
        "tier.start_read_over_needed": 1.02,
    }
    assert all(row.is_met for row in rows.values())
    bound["mmap"] = Limited(case(3.0, text=8), 1.0)
    with pytest.raises(RuntimeError, match="mmap said something else"):
        rows_of(free, bound, disk_gb_s=1.0, over_limit=4.2)
