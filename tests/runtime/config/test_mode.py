"""`execution.mode: auto` is a captured step wherever one can be, and never one that is refused later."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from hetero_runtime.config import ResolvedConfig, load_config, render, resolve, settle_mode
from hetero_runtime.config.combinations import check_combinations
from hetero_runtime.config.mode import Settled, eager_unless_named, in_mode
from hetero_runtime.config.presets import PRESETS
from hetero_runtime.errors import BudgetError, ConfigError
from hetero_runtime.plan import Geometry, Gpu, Hardware, make_plan, read_geometry
from hetero_runtime.plan.captured import why_not_captured
from tests.sparse_checkpoint import write_qwen3

GIB = 2**30
GPU = Gpu("a GPU", 24 * GIB, 22 * GIB)
BOX = Hardware(64 * GIB, 60 * GIB, physical_cores=8, usable_cores=8, gpu=GPU)
BOARD = replace(BOX, gpu=Gpu("Orin", 64 * GIB, 60 * GIB, is_integrated=True))
WITHOUT = replace(BOX, gpu=None, no_gpu_reason="there is no driver")
OLD = replace(BOX, gpu=replace(GPU, has_bf16=False))
NO_TRITON = replace(BOX, has_triton=False)

MEMORIES: dict[str, dict[str, Any]] = {
    "most slabs": {},
    "half": {"residency": 0.5},
    "smallest": {"slabs": 2},
    "a layer pinned": {"pinned_prefix": 1, "residency": 0.5},
    "per layer": {"pool": "per_layer", "residency": 0.5},
    "a disk": {"backing": "direct"},
}
DRAFTERS: dict[str, dict[str, Any]] = {
    "no drafts": {},
    "few drafts": {"drafter": "prompt_lookup", "k": 7},
    "many drafts": {"drafter": "prompt_lookup"},
    "a small model": {"drafter": "autoregressive", "model": "small", "k": 4},
    "a block": {"drafter": "block", "k": 7},
}
ROUTINGS: dict[str, dict[str, Any]] = {"": {}, "one set a draft": {"policy": "block_selection"}}


@pytest.fixture(scope="module")
def geometry(tmp_path_factory: pytest.TempPathFactory) -> Geometry:
    return read_geometry(write_qwen3(tmp_path_factory.mktemp("qwen3")))


def settled(geometry: Geometry, box: Hardware = BOX, **tree: Any) -> Settled:
    return settle_mode(load_config(tree), box, geometry)


def assert_sound(found: Settled, box: Hardware, geometry: Geometry) -> None:
    """Nothing refuses what was picked, now or when it is loaded; and eager on a GPU has a reason."""
    check_combinations(found.config, "picked")
    plan = make_plan(geometry, resolve(found.config, box, geometry), box)
    if found.config.execution.mode == "graph":
        assert box is BOX
        assert found.why_eager is None
        assert why_not_captured(geometry, plan.config, box) is None
    elif box is WITHOUT:
        assert found.why_eager is None
    else:
        assert found.why_eager
        assert "\n" not in found.why_eager


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("handler", ["load", "cpu", "hybrid"])
def test_what_is_picked_is_refused_by_nothing(preset: str, handler: str, geometry: Geometry) -> None:
    """Whatever works by name, in every combination with the others."""
    num_sound = 0
    for memory, drafter, routing, rows in product(MEMORIES, DRAFTERS, ROUTINGS, (1, 4, 9)):
        tree = {
            "preset": preset,
            "misses": {"handler": handler},
            "memory": MEMORIES[memory],
            "speculation": DRAFTERS[drafter],
            "routing": ROUTINGS[routing],
            "execution": {"max_rows": rows},
        }
        try:
            config = load_config(tree)
            make_plan(geometry, resolve(in_mode(config, "eager"), BOX, geometry), BOX)
        except (ConfigError, BudgetError):
            continue
        assert_sound(settle_mode(config, BOX, geometry), BOX, geometry)
        num_sound += 1
    assert num_sound or (preset, handler) in (("psr", "cpu"), ("psr", "hybrid"))  # which nothing allows


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("box", [BOARD, WITHOUT], ids=["board", "no GPU"])
def test_where_no_step_can_be_captured_none_is(preset: str, box: Hardware, geometry: Geometry) -> None:
    assert_sound(settled(geometry, box, preset=preset), box, geometry)


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_are_captured_on_a_gpu(preset: str, geometry: Geometry) -> None:
    found = settled(geometry, preset=preset)
    assert found == Settled(in_mode(load_config({"preset": preset}), "graph"))


def test_a_name_stands_whatever_speaks_against_it(geometry: Geometry) -> None:
    for mode in ("eager", "graph"):
        config = load_config({"execution": {"mode": mode}})
        assert settle_mode(config, WITHOUT, geometry) == Settled(config)
        assert eager_unless_named(config) == config
    assert eager_unless_named(load_config()).execution.mode == "eager"


@pytest.mark.parametrize(
    ("tree", "box", "reason"),
    [
        ({"memory": {"backing": "direct"}}, BOX, "the captured step reads records where they lie in host"),
        ({"execution": {"max_rows": 9}}, BOX, r"max_rows: 9 with .*: a captured step has 8 rows at most$"),
        ({"memory": {"slabs": 2}}, BOX, "a layer has 2 slabs, and 4 rows can need 8 experts of it at once"),
        ({"speculation": {"drafter": "prompt_lookup"}}, BOX, "k: 15 with execution.mode: graph is too many"),
        ({}, BOARD, "execution.mode: graph with device: unified is not in this version$"),
        ({}, NO_TRITON, "Triton is not installed"),
        ({}, OLD, "a GPU has no bf16 in hardware"),
    ],
    ids=["disk", "rows", "slabs", "drafts", "board", "no Triton", "old"],
)
def test_a_gpu_that_decodes_eagerly_says_why(
    tree: dict[str, Any], box: Hardware, reason: str, *, geometry: Geometry
) -> None:
    found = settled(geometry, box, **tree)
    assert found.config.execution.mode == "eager"
    assert re.search(reason, found.why_eager or "")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"layer_kinds": frozenset({"compressed_sparse_attention"})}, "keeps the cache of its compressed_"),
        ({"rope_types": frozenset({"dynamic"})}, "rope_type dynamic"),
    ],
    ids=["cache", "rope"],
)
def test_a_model_whose_step_needs_the_host(changes: dict[str, Any], reason: str, geometry: Geometry) -> None:
    found = settled(replace(geometry, **changes))
    assert found.config.execution.mode == "eager"
    assert reason in (found.why_eager or "")


def test_states_forget_no_draft(geometry: Geometry) -> None:
    linear = replace(geometry, layer_kinds=frozenset({"linear_attention", "full_attention"}))
    assert settled(linear).why_eager is None
    found = settled(linear, speculation={"drafter": "prompt_lookup", "k": 3})
    assert "cannot forget" in (found.why_eager or "")


def test_what_fits_only_eagerly_is_eager(geometry: Geometry) -> None:
    """A captured step has workspace of its own, for prompts."""
    asked = {"memory": {"slabs": 16}, "execution": {"max_rows": 1}}
    plans = [
        make_plan(geometry, resolve(in_mode(load_config(asked), mode), BOX, geometry), BOX)
        for mode in ("eager", "graph")
    ]
    eager, graph = (plan.used_bytes("device", "prefill") for plan in plans)
    assert eager < graph
    found = settled(geometry, memory={"slabs": 16, "gpu": (eager + graph) // 2}, execution={"max_rows": 1})
    assert found.config.execution.mode == "eager"
    assert re.match(
        r"the plan does not fit\. device, prefill: needs .*too much \(.*\)\.$", found.why_eager or ""
    )


def test_what_only_a_captured_step_can_do_takes_one_or_says_why_not(geometry: Geometry) -> None:
    pregate = {"prediction": {"predictor": "pregate"}, "prefetch": {"schedule": "top_b"}}
    assert settled(geometry, **pregate).config.execution.mode == "graph"
    with pytest.raises(ConfigError, match=r"here execution\.mode: eager"):
        settled(geometry, WITHOUT, **pregate)
    with pytest.raises(ConfigError, match=r"\(here that cannot be: Triton is not installed"):
        settled(geometry, NO_TRITON, **pregate)


def test_the_decided_mode_is_what_loads_back(geometry: Geometry, tmp_path: Path) -> None:
    found = settled(geometry)
    first: ResolvedConfig = resolve(found.config, BOX, geometry)
    (tmp_path / "again.yaml").write_text(render(first))
    again = settle_mode(load_config(tmp_path / "again.yaml"), NO_TRITON, geometry)
    assert again.config.execution.mode == "graph"
