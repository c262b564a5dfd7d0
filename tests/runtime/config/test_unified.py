"""Who computes on unified memory, with how many slabs, and what is refused there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hetero_runtime.config import ResolvedConfig, load_config, render, resolve, settle_mode
from hetero_runtime.errors import BudgetError, ConfigError
from hetero_runtime.plan import Geometry, Gpu, Hardware, read_geometry
from tests.sparse_checkpoint import write_qwen3

GIB = 2**30
GPU = Gpu("Orin", 30 * GIB, 9 * GIB, is_integrated=True)
BOARD = Hardware(30 * GIB, 24 * GIB, physical_cores=8, usable_cores=8, gpu=GPU)
WORKSTATION = replace(BOARD, gpu=Gpu("a graphics card", 12 * GIB, 11 * GIB))


@pytest.fixture(scope="module")
def geometry(tmp_path_factory: pytest.TempPathFactory) -> Geometry:
    return read_geometry(write_qwen3(tmp_path_factory.mktemp("qwen3")))


def _resolve(geometry: Geometry, box: Hardware = BOARD, **tree: Any) -> ResolvedConfig:
    return resolve(settle_mode(load_config(tree), box, geometry).config, box, geometry)


def test_auto_is_unified_where_the_gpu_has_no_memory_of_its_own(geometry: Geometry) -> None:
    resolved = _resolve(geometry)
    assert (resolved.device, resolved.torch_device, resolved.slabs_are_bank) == ("unified", "cuda", True)
    assert resolved.memory.slabs == geometry.num_routed_experts
    assert resolved.memory.host_slabs == 0
    assert not resolved.memory.packed
    assert _resolve(geometry, WORKSTATION).device == "cuda"


def test_free_memory_is_counted_once_and_as_the_kernel_counts_it(geometry: Geometry) -> None:
    memory = _resolve(geometry).memory
    assert memory.gpu == memory.host
    assert 22 * GIB <= memory.host < 24 * GIB, "the driver's 9 GiB leave out what the page cache gives back"
    capped = _resolve(geometry, memory={"gpu": "3GiB"}).memory
    assert capped.gpu == 3 * GIB


def test_a_graphics_card_plays_it_within_its_own_memory(geometry: Geometry) -> None:
    resolved = _resolve(geometry, WORKSTATION, device="unified")
    assert resolved.device == "unified"
    assert resolved.memory.gpu < 11 * GIB < resolved.memory.host


def test_a_resolved_configuration_says_the_same_again(geometry: Geometry, tmp_path: Path) -> None:
    resolved = _resolve(geometry)
    (tmp_path / "again.yaml").write_text(render(resolved))
    again = resolve(load_config(tmp_path / "again.yaml"), BOARD, geometry)
    assert render(again) == render(resolved)


def test_from_a_disk_slabs_are_as_many_as_wanted(geometry: Geometry) -> None:
    resolved = _resolve(geometry, memory={"backing": "direct", "residency": 0.5})
    assert resolved.memory.slabs == geometry.num_routed_experts // 2
    assert resolved.memory.host_slabs == 0
    with pytest.raises(BudgetError, match=r"memory\.slabs=1 is too few"):
        _resolve(geometry, memory={"backing": "direct", "slabs": 1})


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"memory": {"slabs": 4}}, r"memory\.slabs: 4 with device: unified and memory\.backing: ram"),
        ({"memory": {"residency": 0.25}}, r"memory\.residency: 0\.25 with device: unified.* direct"),
        ({"execution": {"mode": "graph"}}, r"graph with device: unified is not in this version"),
        ({"memory": {"packed": True}}, r"memory\.packed: true saves bytes on the way"),
        ({"misses": {"handler": "hybrid"}}, r"misses\.handler: hybrid computes what the GPU does not have"),
    ],
    ids=["slabs", "residency", "graph", "packed", "hybrid"],
)
def test_what_makes_no_sense_there_is_refused(geometry: Geometry, tree: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _resolve(geometry, **tree)


def test_without_a_gpu_or_a_mapping_it_cannot_be(geometry: Geometry) -> None:
    bare = replace(BOARD, gpu=None, no_gpu_reason="there is no driver")
    with pytest.raises(ConfigError, match="device: unified was asked for, but there is no driver"):
        _resolve(geometry, bare, device="unified")
    old = replace(BOARD, gpu=Gpu("an old one", 8 * GIB, 8 * GIB, maps_host_memory=False))
    with pytest.raises(ConfigError, match="an old one cannot read host memory where it lies"):
        _resolve(geometry, old, device="unified")


def test_cuda_on_such_a_board_counts_its_memory_once_too(geometry: Geometry) -> None:
    memory = _resolve(geometry, device="cuda").memory
    assert memory.gpu == memory.host
