"""Every `auto` is decided, by a pure function, for a machine that the test writes down."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from hetero_runtime.config import ResolvedConfig, load_config, model_dir, render, resolve, settle_mode
from hetero_runtime.errors import BudgetError, ConfigError
from hetero_runtime.plan import Geometry, Gpu, Hardware, read_geometry
from tests.sparse_checkpoint import write_qwen3

GIB = 2**30
CPU_BOX = Hardware(16 * GIB, 12 * GIB, physical_cores=8, usable_cores=6, no_gpu_reason="there is no driver")
GPU_BOX = replace(CPU_BOX, gpu=Gpu("a GPU", 24 * GIB, 22 * GIB), no_gpu_reason="")


@pytest.fixture(scope="module")
def geometry(tmp_path_factory: pytest.TempPathFactory) -> Geometry:
    return read_geometry(write_qwen3(tmp_path_factory.mktemp("qwen3")))


def _resolve(
    geometry: Geometry, tree: dict[str, Any] | None = None, box: Hardware = CPU_BOX
) -> ResolvedConfig:
    return resolve(settle_mode(load_config(tree), box, geometry).config, box, geometry)


def test_auto_on_a_machine_without_a_gpu(geometry: Geometry) -> None:
    resolved = _resolve(geometry)
    assert (resolved.preset, resolved.device, resolved.model.dtype) == ("lru", "cpu", "bfloat16")
    assert resolved.memory.slabs == 32
    assert resolved.memory.pinned_prefix == 0
    assert resolved.cpu.threads == 6
    assert resolved.execution.mode == "eager"
    assert resolved.memory.gpu == resolved.memory.host < 12 * GIB


@pytest.mark.parametrize("misses", ["load", "cpu", "hybrid"])
def test_more_threads_than_cores_are_refused_whoever_computes(geometry: Geometry, misses: str) -> None:
    def threads(asked: int) -> int:
        tree = {"cpu": {"threads": asked}, "misses": {"handler": misses}}
        return _resolve(geometry, tree).cpu.threads

    assert threads(7) == 7
    with pytest.raises(
        ConfigError, match=r"cpu\.threads=8 is too many for the 6 cores .*; write 7 or less, or auto"
    ):
        threads(8)


def test_auto_on_a_machine_with_a_gpu(geometry: Geometry) -> None:
    resolved = _resolve(geometry, box=GPU_BOX)
    assert resolved.device == "cuda"
    assert 19 * GIB < resolved.memory.gpu < 22 * GIB


def test_cuda_without_a_gpu_says_why(geometry: Geometry) -> None:
    with pytest.raises(
        ConfigError, match="device: cuda was asked for, but there is no driver; write device: cpu"
    ):
        _resolve(geometry, {"device": "cuda"})


def test_a_captured_step_needs_a_gpu(geometry: Geometry) -> None:
    tree = {"execution": {"mode": "graph"}}
    assert _resolve(geometry, tree, GPU_BOX).execution.mode == "graph"
    with pytest.raises(ConfigError, match=r"execution\.mode: graph needs a CUDA device"):
        _resolve(geometry, tree)


@pytest.mark.parametrize(
    ("memory", "box", "slabs"),
    [
        ({"backing": "ram"}, GPU_BOX, 0),
        ({"backing": "direct"}, CPU_BOX, 0),
        ({"backing": "mmap"}, GPU_BOX, 2),
        ({"backing": "swap"}, GPU_BOX, 2),
        ({"backing": "direct"}, GPU_BOX, 32),
        ({"backing": "direct", "host_slabs": 9}, GPU_BOX, 9),
    ],
)
def test_host_slabs_lie_between_a_disk_and_a_device(
    geometry: Geometry, memory: dict[str, Any], box: Hardware, slabs: int
) -> None:
    resolved = _resolve(geometry, {"memory": memory}, box)
    assert resolved.memory.host_slabs == slabs
    assert resolved.memory.packed is (memory["backing"] == "ram" and box is GPU_BOX)


@pytest.mark.parametrize(
    ("memory", "box"),
    [
        ({"host_slabs": 5}, GPU_BOX),
        ({"backing": "direct", "host_slabs": 5}, CPU_BOX),
        ({"backing": "direct", "host_slabs": 1}, GPU_BOX),
        ({"backing": "direct", "host_slabs": 33}, GPU_BOX),
    ],
    ids=["ram", "cpu", "few", "many"],
)
def test_host_slabs_that_cannot_be(geometry: Geometry, memory: dict[str, Any], box: Hardware) -> None:
    with pytest.raises(ConfigError, match=r"memory\.host_slabs=\d+ cannot be .*; leave it out"):
        _resolve(geometry, {"memory": memory}, box)


@pytest.mark.parametrize(
    ("changes", "box", "packed"),
    [
        ({}, GPU_BOX, True),
        ({}, CPU_BOX, False),
        ({"has_bf16_experts": False}, GPU_BOX, False),
        ({"record_bytes": 8192}, GPU_BOX, False),
    ],
    ids=["bf16", "cpu", "fp8", "tiny"],
)
def test_experts_are_packed_where_it_pays(
    geometry: Geometry, changes: dict[str, Any], box: Hardware, packed: bool
) -> None:
    model = replace(geometry, **changes)
    assert _resolve(model, box=box).memory.packed is packed
    assert not _resolve(model, {"memory": {"packed": False}}, box).memory.packed


@pytest.mark.parametrize(
    ("changes", "tree", "reason"),
    [
        ({}, {"device": "cpu"}, "a CUDA device decodes packed experts, and device is cpu"),
        (
            {"has_bf16_experts": False, "expert_dtype": "F8_E4M3"},
            {},
            "only bf16 experts can be packed, and these are F8_E4M3, or not that alone",
        ),
        ({"record_bytes": 8192}, {}, "experts of 8192 bytes do not get smaller by it"),
    ],
    ids=["cpu", "fp8", "tiny"],
)
def test_packing_that_cannot_be_is_refused(
    geometry: Geometry, changes: dict[str, Any], tree: dict[str, Any], reason: str
) -> None:
    with pytest.raises(
        ConfigError, match=rf"memory\.packed: true cannot be: {reason}; write memory\.packed: auto"
    ):
        _resolve(replace(geometry, **changes), {"memory": {"packed": True}, **tree}, GPU_BOX)


def test_default_length_bows_to_the_model_and_an_explicit_one_does_not(geometry: Geometry) -> None:
    assert _resolve(geometry).execution.max_length == 2048
    with pytest.raises(ConfigError, match=r"max_length=9000 is over the model's context of 2048 tokens"):
        _resolve(geometry, {"execution": {"max_length": 9000}})


@pytest.mark.parametrize(
    ("memory", "slabs"),
    [
        ({"slabs": 5}, 5),
        ({"slabs": "all"}, 32),
        ({"residency": 0.25}, 8),
        ({"residency": 1}, 32),
        ({"residency": 0.27, "pool": "per_layer"}, 8),
        ({"slabs": 12, "pool": "per_layer"}, 12),
        ({"slabs": "all", "pinned_prefix": 1}, 24),
        ({"pinned_prefix": "all"}, 0),
        ({"slabs": 0, "pinned_prefix": 4}, 0),
    ],
)
def test_slabs(geometry: Geometry, memory: dict[str, Any], slabs: int) -> None:
    assert _resolve(geometry, {"memory": memory}).memory.slabs == slabs


@pytest.mark.parametrize(
    ("memory", "error", "part"),
    [
        ({"slabs": 1}, BudgetError, "memory.slabs=1 is too few: the smallest legal number is 2"),
        ({"slabs": 0}, BudgetError, r"running without any slab needs misses.handler: cpu\)"),
        ({"slabs": 4, "pool": "per_layer"}, BudgetError, "the smallest legal number is 8"),
        ({"residency": 0.04}, BudgetError, r"smallest legal residency is 0.0625 \(2 slabs\)"),
        ({"slabs": 33}, ConfigError, "more than the 32 routed experts"),
        ({"slabs": 9, "pool": "per_layer"}, ConfigError, "write 8 or 12"),
        ({"pinned_prefix": 5}, ConfigError, "more than the model's 4 MoE layers"),
    ],
)
def test_impossible_slabs(
    geometry: Geometry, memory: dict[str, Any], error: type[Exception], part: str
) -> None:
    with pytest.raises(error, match=part):
        _resolve(geometry, {"memory": memory})


def test_smallest_legal_residency_that_a_message_names_is_legal(geometry: Geometry) -> None:
    assert _resolve(geometry, {"memory": {"residency": 0.0625}}).memory.slabs == 2


@pytest.mark.parametrize("box", [CPU_BOX, GPU_BOX], ids=["cpu", "gpu"])
def test_rendered_yaml_loads_back_to_the_same(geometry: Geometry, box: Hardware) -> None:
    resolved = _resolve(geometry, {"memory": {"residency": 0.5}}, box)
    assert _resolve(geometry, yaml.safe_load(render(resolved)), box) == resolved


def test_resolve_is_pure(geometry: Geometry) -> None:
    config = load_config()
    settled = settle_mode(config, GPU_BOX, geometry)
    assert settled == settle_mode(config, GPU_BOX, geometry)
    assert resolve(settled.config, GPU_BOX, geometry) == resolve(settled.config, GPU_BOX, geometry)
    assert config == load_config()


def test_a_model_path_may_start_at_home() -> None:
    assert model_dir(load_config({"model": {"path": "~/m"}})) == Path.home() / "m"


def test_a_logical_cache_is_as_large_as_a_layers_slabs_unless_said(geometry: Geometry) -> None:
    def capacity(tree: dict[str, Any]) -> int:
        return _resolve(geometry, tree).routing.capacity

    layers, top_k, num_experts = geometry.num_moe_layers, geometry.top_k, geometry.num_experts
    psr: dict[str, Any] = {"preset": "psr"}
    assert capacity({**psr, "memory": {"slabs": layers * top_k}}) == top_k
    assert capacity({**psr, "memory": {"slabs": top_k, "pool": "global"}}) == top_k
    assert capacity({**psr, "memory": {"slabs": layers * top_k}, "routing": {"capacity": num_experts}}) == (
        num_experts
    )
    with pytest.raises(ConfigError, match=rf"capacity={top_k - 1}: .* write {top_k} to {num_experts}"):
        capacity({**psr, "routing": {"capacity": top_k - 1}})
    assert _resolve(geometry, psr).routing.priority == "a"
    assert _resolve(geometry, {"routing": {"policy": "cache_prior"}}).routing.priority == "lru"
    with pytest.raises(ConfigError, match=r"more than the .* experts of a token"):
        capacity({"routing": {"policy": "cache_prior", "protected": num_experts}})
