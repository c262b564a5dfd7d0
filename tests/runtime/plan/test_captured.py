"""What a captured step asks of slabs and tables; and who is told how steps will run, and why."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console
from typer.testing import CliRunner

from hetero_runtime import planned
from hetero_runtime.cli import app
from hetero_runtime.config import load_config, resolve
from hetero_runtime.config.tree import Pool
from hetero_runtime.errors import ConfigError
from hetero_runtime.plan import Geometry, Gpu, detect, read_geometry, render_plan, to_json
from hetero_runtime.plan.captured import (
    MOST_OUTSTANDING,
    slabs_of_layers,
    why_no_tables,
    why_too_few_slabs,
)
from hetero_runtime.planned import plan_for
from tests.sparse_checkpoint import write_qwen3

GIB = 2**30


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model of four layers of 8 experts, top-2, on a machine with a GPU."""
    gpu = Gpu("a GPU", 24 * GIB, 22 * GIB)
    monkeypatch.setattr(planned, "detect", lambda _device: replace(detect("cpu"), gpu=gpu, has_triton=True))
    return write_qwen3(tmp_path / "model")


@pytest.fixture
def geometry(folder: Path) -> Geometry:
    return read_geometry(folder)


@pytest.mark.parametrize(
    ("sizes", "pool", "rows", "spare", "needed"),
    [
        ([8, 8], "global", 4, 0, None),
        ([7, 7], "global", 4, 0, 8),
        ([8, 8], "global", 4, 4, 12),
        ([16, 16], "global", 8, 4, 20),  # a full layer's worth, but for both
        ([32, 32], "global", 8, 4, None),
        ([16], "global", 8, 4, None),  # all of one layer
        ([7, 7], "per_layer", 4, 0, 16),
        ([16, 16], "per_layer", 8, 4, None),  # each has all of its own
        ([12, 12], "per_layer", 4, 4, None),
        ([], "global", 8, 4, None),  # all layers are pinned
    ],
    ids=str,
)
def test_slabs_for_all_that_rows_can_need_at_once(
    sizes: list[int], pool: Pool, rows: int, *, spare: int, needed: int | None
) -> None:
    reason = why_too_few_slabs(sizes, pool, num_experts=16, rows=rows, top_k=2, spare=spare)
    assert (reason is None) == (needed is None), reason
    assert needed is None or f"set memory.slabs={needed} or more" in str(reason)


def test_a_pinned_prefix_lends_nobody_its_slabs(geometry: Geometry, folder: Path) -> None:
    """Though with a global pool they lie side by side with the others."""
    for pool, sizes in (("per_layer", [2, 2, 2]), ("global", [6, 6, 6])):
        memory = {"slabs": 6, "pinned_prefix": 1, "pool": pool}
        tree = {"memory": memory, "execution": {"mode": "graph"}}
        config = resolve(load_config(tree), planned.detect("cuda"), geometry)
        assert slabs_of_layers(config.memory, num_layers=geometry.num_moe_layers) == sizes
    found = plan_for(load_config({"model": {"path": str(folder)}, "memory": memory}))
    assert "a layer has 6 slabs, and 4 rows can need 8" in (found.memory.why_eager or "")


def test_tables_have_a_size(geometry: Geometry) -> None:
    config = resolve(load_config({"execution": {"mode": "graph"}}), planned.detect("cuda"), geometry)
    assert why_no_tables(geometry, config.memory, num_pairs=128) is None
    assert "129 tokens times top-k" in (why_no_tables(geometry, config.memory, num_pairs=129) or "")
    many = replace(config.memory, slabs=8192 - 7, pinned_prefix=1)
    assert "8193 slots" in (why_no_tables(geometry, many, num_pairs=8) or "")
    wide = replace(geometry, num_experts=513)
    assert "513 experts a layer" in (why_no_tables(wide, config.memory, num_pairs=8) or "")


def test_prefetches_hold_slabs_of_a_small_cache(folder: Path) -> None:
    tree: dict[str, Any] = {"model": {"path": str(folder)}, "memory": {"slabs": 8 + MOST_OUTSTANDING - 1}}
    assert plan_for(load_config(tree)).config.execution.mode == "graph"
    pregate = {"prediction": {"predictor": "pregate"}, "prefetch": {"schedule": "top_b"}}
    with pytest.raises(ConfigError, match=r"beside 4 prefetches; set memory\.slabs=12 or more"):
        plan_for(load_config(tree | pregate))


@pytest.mark.parametrize(
    ("sections", "line"),
    [
        ({}, "decode: graph, the whole step captured"),
        ({"memory": {"slabs": 2}}, "decode: eager, since a captured step cannot be: a layer has 2 slabs"),
        ({"execution": {"mode": "eager"}}, "decode: eager\n"),
    ],
    ids=["graph", "why not", "asked for"],
)
def test_the_plan_says_how_and_why(folder: Path, sections: dict[str, Any], line: str) -> None:
    plan = plan_for(load_config({"model": {"path": str(folder)}, **sections})).memory
    console = Console(width=400, no_color=True)
    with console.capture() as shown:
        console.print(render_plan(plan))
    assert line in "\n".join(text.rstrip() for text in shown.get().splitlines())
    facts = to_json(plan)
    assert facts["mode"] == plan.config.execution.mode
    assert (facts["why_eager"] is not None) == ("cannot be" in line)


def test_the_configuration_says_why_in_a_comment(folder: Path) -> None:
    words = ["config", "--set", f"model.path={folder}", "--set", "memory.slabs=2"]
    text = CliRunner().invoke(app, words).stdout
    assert text.startswith("# execution.mode: auto is eager here: a layer has 2 slabs")
    assert yaml.safe_load(text)["execution"]["mode"] == "eager"
    as_json = json.loads(CliRunner().invoke(app, [*words, "--json"]).stdout)
    assert as_json["execution"] == yaml.safe_load(text)["execution"]
    graph = CliRunner().invoke(app, words[:3]).stdout
    assert yaml.safe_load(graph)["execution"]["mode"] == "graph"
    assert not graph.startswith("#")
