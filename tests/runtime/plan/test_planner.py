"""Slabs that fit are the most that fit; what does not fit is refused with a change that does."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from hetero_runtime.config import ResolvedConfig, load_config, resolve, settle_mode
from hetero_runtime.config.mode import eager_unless_named
from hetero_runtime.errors import BudgetError
from hetero_runtime.plan import (
    Geometry,
    Gpu,
    Hardware,
    MemoryPlan,
    make_plan,
    read_geometry,
    render_plan,
    to_json,
)
from hetero_runtime.plan.budget import Budgets
from hetero_runtime.plan.demand import RETURNING_RECORDS, STAGING_RECORDS, Demand, fixed_rows
from hetero_runtime.plan.quantized import quantized
from hetero_runtime.plan.slabs import fit_slabs, least_slabs, most_slabs, slab_row
from tests.sparse_checkpoint import QWEN3_30B, write_qwen3

GIB, MIB = 2**30, 2**20
CONFIGS = Path(__file__).parents[3] / "configs"


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Geometry:
    return read_geometry(write_qwen3(tmp_path_factory.mktemp("small")))


@pytest.fixture(scope="module")
def qwen3_30b(tmp_path_factory: pytest.TempPathFactory) -> Geometry:
    return read_geometry(write_qwen3(tmp_path_factory.mktemp("qwen3_30b"), QWEN3_30B, shards=16))


def _box(ram: int = 64 * GIB, gpu: int | None = 22 * GIB) -> Hardware:
    return Hardware(ram, ram, 8, 8, gpu=None if gpu is None else Gpu("a GPU", 24 * GIB, gpu))


def _plan(geometry: Geometry, hardware: Hardware, tree: dict[str, Any] | None = None) -> MemoryPlan:
    return make_plan(geometry, _resolved(geometry, hardware, tree), hardware)


def _resolved(geometry: Geometry, hardware: Hardware, tree: dict[str, Any] | None) -> ResolvedConfig:
    return resolve(eager_unless_named(load_config(tree)), hardware, geometry)


def _refusal(geometry: Geometry, hardware: Hardware, tree: dict[str, Any] | None = None) -> str:
    with pytest.raises(BudgetError) as caught:
        _plan(geometry, hardware, tree)
    return str(caught.value)


def _table(plan: MemoryPlan) -> str:
    written = io.StringIO()
    Console(width=120, file=written).print(render_plan(plan))
    return written.getvalue()


def test_a_24_gb_workstation(qwen3_30b: Geometry) -> None:
    plan = _plan(qwen3_30b, _box())
    rows = {row.name: row for row in plan.rows}
    assert set(rows) == {"backbone", "KV cache", "workspace", "slabs", "unpacking", "host bank", "staging"}
    assert rows["host bank"].load == 57_982_058_496
    assert rows["host bank"].decode == plan.bank_bytes
    assert rows["KV cache"].decode == 4 * 4096 * 98304
    assert rows["KV cache"].load == 0
    assert rows["workspace"].prefill > rows["workspace"].decode
    assert 0.2 < plan.residency < 0.35
    assert plan.used_bytes("device", "prefill") <= plan.budgets.device


def test_a_packed_bank_is_loaded_plain_and_kept_smaller(qwen3_30b: Geometry) -> None:
    plain = _plan(qwen3_30b, _box(), {"memory": {"packed": False}})
    packed = _plan(qwen3_30b, _box(), {"memory": {"packed": True}})
    record = qwen3_30b.packed_record_bytes
    assert record is not None
    assert (plain.bank_bytes, packed.bank_bytes) == (57_982_058_496, 6144 * record)
    assert 0.75 < packed.bank_bytes / plain.bank_bytes < 0.76
    before, after = ({row.name: row for row in plan.rows} for plan in (plain, packed))
    assert before["host bank"].load == after["host bank"].load == before["host bank"].decode
    assert after["host bank"].prefill == after["host bank"].decode == packed.bank_bytes
    assert "unpacking" not in before
    assert after["unpacking"].load == after["unpacking"].decode == 4 * record
    assert to_json(packed)["is_packed"]


def test_on_cpu_slabs_and_backbone_lie_in_host_memory(small: Geometry) -> None:
    plan = _plan(small, _box(gpu=None), {"memory": {"residency": 0.5}})
    on_host = sum(row.decode for row in plan.rows)
    assert plan.used_bytes("host", "decode") == on_host
    assert plan.used_bytes("device", "decode") == on_host - plan.bank_bytes


@pytest.mark.parametrize("backing", ["direct", "mmap", "swap"])
def test_experts_below_host_memory_take_none_of_it(small: Geometry, backing: str) -> None:
    box = replace(_box(ram=400 * MIB, gpu=None), swap_free_bytes=10 * GIB)
    plan = _plan(small, box, {"memory": {"backing": backing, "residency": 0.25}})
    rows = {row.name: row for row in plan.rows}
    below = rows["swapped experts" if backing == "swap" else "expert file"]
    assert (below.tier, below.decode) == ("disk", plan.bank_bytes)
    assert "host bank" not in rows
    assert "host slabs" not in rows  # the device's are that already
    assert plan.used_bytes("host", "decode") == sum(r.decode for r in plan.rows if r.tier != "disk")
    table = _table(plan)
    assert ("swap" in table) == (backing == "swap")
    assert ("is there already" in table) == (backing != "swap")
    assert to_json(plan)["backing"] == backing


def test_unified_memory_is_one_and_holds_experts_once(qwen3_30b: Geometry) -> None:
    gpu = Gpu("a board", 64 * GIB, 20 * GIB, is_integrated=True)
    plan = _plan(qwen3_30b, replace(_box(ram=64 * GIB), gpu=gpu), {"execution": {"max_rows": 1}})
    rows = {row.name: row for row in plan.rows}
    assert "host bank" not in rows
    assert "unpacking" not in rows
    assert rows["slabs"].decode == plan.bank_bytes == qwen3_30b.bank_bytes
    assert plan.used_bytes("host", "decode") == sum(row.decode for row in plan.rows)
    table = _table(plan)
    assert "unified memory" in table
    assert "nothing is copied" in table
    assert table.count("in all") == 1
    assert "a board, in the host's memory; 64.0 GiB of 64.0 GiB RAM free" in table
    small_board = replace(_box(ram=32 * GIB), gpu=gpu)
    told = _refusal(qwen3_30b, small_board)
    assert re.search(r"host, \w+: needs .*too much \(slabs 54\.0 GiB", told)
    assert "What fits: memory.backing=direct, with experts on an SSD" in told
    assert "memory.slabs" not in told
    from_disk = _plan(qwen3_30b, small_board, {"memory": {"backing": "direct"}})
    assert {row.name for row in from_disk.rows} >= {"slabs", "expert file"}
    assert "host slabs" not in {row.name for row in from_disk.rows}
    assert "is there already" in _table(from_disk)


def test_a_graphics_card_that_plays_a_board_is_told_what_it_costs(small: Geometry) -> None:
    table = _table(_plan(small, _box(), {"device": "unified"}))
    assert "every read of an expert crosses the link" in table


def test_three_tiers_with_a_gpu(qwen3_30b: Geometry) -> None:
    box = _box(ram=32 * GIB)
    assert "host, load: needs" in _refusal(qwen3_30b, box)  # all 54 GiB in host memory
    plan = _plan(qwen3_30b, box, {"memory": {"backing": "direct"}})
    rows = {row.name: row for row in plan.rows}
    assert [rows[name].tier for name in ("slabs", "host slabs", "expert file")] == ["device", "host", "disk"]
    assert "unpacking" not in rows
    host_slabs = plan.config.memory.host_slabs
    assert rows["host slabs"].decode == host_slabs * qwen3_30b.record_bytes
    assert plan.used_bytes("host", "load") <= plan.budgets.host
    assert plan.budgets.host - plan.used_bytes("host", "load") < qwen3_30b.record_bytes
    few = _plan(qwen3_30b, box, {"memory": {"backing": "direct", "host_slabs": 100}})
    assert few.config.memory.host_slabs == 100
    on_their_way = {row.name: row for row in few.rows}["staging"].decode // qwen3_30b.record_bytes
    assert on_their_way == STAGING_RECORDS + RETURNING_RECORDS
    assert _plan(qwen3_30b, box, {"memory": {"backing": "mmap"}}).config.memory.host_slabs == 8


def test_too_little_memory_for_a_token_is_refused_on_every_tier(qwen3_30b: Geometry) -> None:
    refusal = _refusal(qwen3_30b, _box(ram=1 * GIB), {"memory": {"backing": "direct", "host": "64MiB"}})
    assert "host, load: needs" in refusal
    swap = {"memory": {"backing": "swap", "slabs": 100}}
    refusal = _refusal(qwen3_30b, replace(_box(), swap_free_bytes=8 * GIB), swap)
    assert "disk, load: needs 54.0 GiB of 8.0 GiB allowed" in refusal
    assert "free swap (swapon)" in refusal


def test_memory_gpu_caps_the_device_part_on_cpu(small: Geometry) -> None:
    plan = _plan(small, _box(gpu=None), {"memory": {"gpu": "24MiB"}, "execution": {"max_rows": 1}})
    assert 0 < plan.config.memory.slabs < 32
    assert plan.used_bytes("device", "prefill") <= 24 * MIB


@pytest.mark.parametrize("pool", ["global", "per_layer"])
@settings(max_examples=60, deadline=None)
@given(
    device_bytes=st.integers(0, 80 * MIB),
    host_bytes=st.integers(0, 80 * MIB),
    is_shared=st.booleans(),
    pinned=st.integers(0, 4),
    rows=st.integers(1, 8),
    length=st.integers(1, 2048),
)
def test_fitting_slabs_fit_and_one_step_more_does_not(
    small: Geometry,
    pool: Any,
    device_bytes: int,
    host_bytes: int,
    is_shared: bool,
    pinned: int,
    rows: int,
    length: int,
) -> None:
    budgets = Budgets(device_bytes, host_bytes, is_shared)
    device: Any = "cpu" if is_shared else "cuda"
    demand = Demand(device, "bfloat16", max_rows=rows, max_length=length, pinned_prefix=pinned)
    fixed = fixed_rows(small, demand)

    def fits(slabs: int) -> bool:
        shortages = budgets.shortages([*fixed, slab_row(small, slabs)])
        return all(shortage.tier == "host" and not is_shared for shortage in shortages)

    slabs = fit_slabs(small, demand, budgets, pool)
    step = 4 - pinned if pool == "per_layer" else 1
    assert 0 <= slabs <= most_slabs(small, pinned)
    assert slabs == 0 or fits(slabs)
    assert slabs == most_slabs(small, pinned) or not fits(slabs + step)


def test_too_many_slabs_are_refused_with_the_number_that_fits(qwen3_30b: Geometry) -> None:
    message = _refusal(qwen3_30b, _box(), {"memory": {"slabs": "all"}})
    fitting = re.search(r"memory\.slabs=(\d+)", message)
    assert fitting is not None, message
    assert "slabs 54.0 GiB" in message
    count = int(fitting[1])
    assert _plan(qwen3_30b, _box(), {"memory": {"slabs": count}}).config.memory.slabs == count
    assert "does not fit" in _refusal(qwen3_30b, _box(), {"memory": {"slabs": count + 1}})


def test_a_cache_that_is_too_long_is_refused_with_lengths_and_rows_that_fit(qwen3_30b: Geometry) -> None:
    tree = {"execution": {"max_length": 32768, "max_rows": 8}}
    message = _refusal(qwen3_30b, _box(), tree)
    for field, smallest_wrong in (("max_length", 1), ("max_rows", 1)):
        found = re.search(rf"execution\.{field}=(\d+)", message)
        assert found is not None, message
        value = int(found[1])
        _plan(qwen3_30b, _box(), {"execution": {**tree["execution"], field: value}})
        over = {**tree["execution"], field: value + smallest_wrong}
        assert "does not fit" in _refusal(qwen3_30b, _box(), {"execution": over})


def test_a_pinned_prefix_that_is_too_deep_is_refused_with_one_that_fits(qwen3_30b: Geometry) -> None:
    message = _refusal(qwen3_30b, _box(), {"memory": {"pinned_prefix": "all"}})
    found = re.search(r"memory\.pinned_prefix=(\d+)", message)
    assert found is not None, message
    _plan(qwen3_30b, _box(), {"memory": {"pinned_prefix": int(found[1])}})


def test_a_host_that_is_too_small_is_told_what_it_lacks(qwen3_30b: Geometry) -> None:
    message = _refusal(qwen3_30b, _box(ram=50 * GIB))
    assert re.search(r"host, load: needs 54\.\d GiB of 48\.0 GiB allowed, 6\.\d GiB too much", message)
    assert "host bank 54.0 GiB" in message
    assert re.search(r"it takes 6\.\d GiB more host RAM", message)


def test_a_budget_below_what_is_free_is_told_so(qwen3_30b: Geometry) -> None:
    message = _refusal(qwen3_30b, _box(), {"memory": {"host": "40GiB"}})
    found = re.search(r"memory\.host=(\d+MiB)", message)
    assert found is not None, message
    assert "64.0 GiB are free now" in message
    _plan(qwen3_30b, _box(), {"memory": {"host": found[1]}})


def test_a_machine_without_room_for_anything(small: Geometry) -> None:
    message = _refusal(small, _box(ram=300 * MIB, gpu=None), {"memory": {"host": "1MiB", "gpu": "1MiB"}})
    assert message.count("too much") == 1, "one memory, one complaint"


@pytest.mark.parametrize("pool", ["global", "per_layer"])
def test_auto_never_goes_below_the_legal_minimum(small: Geometry, pool: str) -> None:
    hardware = _box(gpu=300 * MIB)
    resolved = _resolved(small, hardware, {"memory": {"pool": pool, "gpu": 0}})
    assert resolved.memory.slabs == least_slabs(small, resolved.memory.pool, 0)
    with pytest.raises(BudgetError):
        make_plan(small, resolved, hardware)


def test_attention_with_sinks_needs_room_for_its_scores(qwen3_30b: Geometry) -> None:
    sinks = replace(qwen3_30b, attention=replace(qwen3_30b.attention, is_eager=True))
    scores = 32 * 4096 * 4096 * (2 + 4)
    plain, eager = (
        next(row for row in _plan(geometry, _box()).rows if row.name == "workspace")
        for geometry in (qwen3_30b, sinks)
    )
    assert eager.prefill - plain.prefill == scores


def test_graph_mode_counts_the_buffers_of_grouped_prefill(qwen3_30b: Geometry) -> None:
    eager, short, long = (
        next(
            row
            for row in _plan(
                qwen3_30b,
                _box(),
                {"memory": {"slabs": 64}, "execution": {"mode": mode, "max_length": length, "max_rows": 1}},
            ).rows
            if row.name == "workspace"
        )
        for mode, length in (("eager", 1024), ("graph", 1024), ("graph", 8192))
    )
    buffers = 1024 * 8 * ((768 + 2048) * 2 + 40)
    assert short.prefill - eager.prefill == short.decode - eager.decode == buffers
    assert long.decode - short.decode < 4 * buffers  # longer prompts run in chunks


def test_report_shows_every_row(qwen3_30b: Geometry) -> None:
    plan = _plan(qwen3_30b, _box())
    text = _table(plan)
    for part in (*(row.name for row in plan.rows), "48 MoE layers × 128 experts, top-8", "allowed", "a GPU"):
        assert part in text


def test_json_adds_up(small: Geometry, tmp_path: Path) -> None:
    plan = _plan(small, _box())
    facts = to_json(plan)
    device = sum(row["decode_bytes"] for row in facts["rows"] if row["tier"] == "device")
    assert facts["used_bytes"]["device"]["decode"] == device
    assert facts["slabs"] == 32
    assert facts["residency"] == 1.0


def test_a_trained_predictor_is_counted(small: Geometry) -> None:
    with_predictor = replace(small, predictor_bytes=5 * MIB)
    (row,) = [row for row in _plan(with_predictor, _box()).rows if row.name == "predictor"]
    logits = 512 * small.num_moe_layers * small.num_experts
    assert (row.tier, row.load, row.decode) == ("host", 10 * MIB, 10 * MIB)
    assert row.prefill >= 10 * MIB + 6 * logits  # float16 as they came, float32 as they are read
    assert not [row for row in _plan(small, _box()).rows if row.name == "predictor"]


def test_a_captured_step_has_a_predictor_of_its_own(small: Geometry) -> None:
    with_predictor = replace(small, predictor_bytes=5 * MIB)
    tree = {"execution": {"mode": "graph", "max_rows": 2}}
    (row,) = [row for row in _plan(with_predictor, _box(), tree).rows if row.name == "captured predictor"]
    layer_experts = small.num_moe_layers * small.num_experts
    assert (row.tier, row.decode) == ("device", 5 * MIB + 2 * 9 * layer_experts * 4)
    assert row.prefill == row.decode + 512 * layer_experts * 2
    assert "captured predictor" not in {row.name for row in _plan(with_predictor, _box()).rows}


IN_PLACE = "experts on the CPU"


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_experts_on_the_cpu_take_room_to_work_and_no_second_copy(qwen3_30b: Geometry, backend: str) -> None:
    tree = {"execution": {"max_rows": 1, "max_length": 4096}, "memory": {"slabs": 64}}
    hybrid = {**tree, "misses": {"handler": "hybrid"}, "cpu": {"backend": backend, "threads": 8}}
    before, after = _plan(qwen3_30b, _box(), tree), _plan(qwen3_30b, _box(), hybrid)
    (row,) = [row for row in after.rows if row.name == IN_PLACE]
    assert (row.tier, row.load) == ("host", 0)
    assert 0 < row.decode < row.prefill < 350 * MIB
    assert f"7 workers ({backend}), one core left for the engine" in row.note
    assert [other for other in after.rows if other.name != IN_PLACE] == list(before.rows)


def test_kt_kernel_keeps_a_second_copy_and_the_plan_says_so(qwen3_30b: Geometry) -> None:
    box = _box(ram=256 * GIB)
    tree = {"misses": {"handler": "cpu"}, "cpu": {"backend": "ktransformers", "threads": 8}}
    (row,) = [row for row in _plan(qwen3_30b, box, tree).rows if row.name == IN_PLACE]
    assert qwen3_30b.bank_bytes < row.decode < row.prefill < qwen3_30b.bank_bytes + 1 * GIB
    int4 = replace(qwen3_30b, expert_dtype="int4")
    (row,) = [row for row in _plan(int4, box, tree).rows if row.name == IN_PLACE]
    assert row.decode > 2 * qwen3_30b.bank_bytes


def test_no_slab_is_needed_where_the_cpu_computes_what_misses(small: Geometry) -> None:
    plan = _plan(small, _box(), {"memory": {"slabs": 0}, "misses": {"handler": "cpu"}})
    assert plan.config.memory.slabs == 0
    assert plan.residency == 0.0
    with pytest.raises(BudgetError, match=r"too few: the smallest legal number is 2"):
        _resolved(small, _box(), {"memory": {"slabs": 0}, "misses": {"handler": "hybrid"}})


@pytest.mark.parametrize(("gib", "is_whole"), [(32, False), (64, True)])
def test_presets_of_boards_fit_them(qwen3_30b: Geometry, gib: int, is_whole: bool) -> None:
    """2 GiB of a board are the firmware's, 3 GiB its system's."""
    ram, gpu = (gib - 2) * GIB, Gpu("Orin", (gib - 2) * GIB, 0, is_integrated=True)
    board = Hardware(ram, ram - 3 * GIB, 8, 8, gpu=gpu)
    config = load_config(CONFIGS / f"jetson_orin_{gib}gb.yaml")
    geometry = quantized(qwen3_30b, config.model.experts)
    plan = make_plan(geometry, resolve(settle_mode(config, board, geometry).config, board, geometry), board)
    assert plan.config.slabs_are_bank == is_whole
    assert (plan.residency == 1.0) == is_whole
    assert plan.residency > 0.5
