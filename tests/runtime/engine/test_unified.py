"""Unified memory, played by the host: experts are computed where they lie, and nothing is copied.

On a GPU the same engine reads mapped memory; a GPU with memory of its own plays the board there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hetero_gpu import mapped
from hetero_runtime import planned
from hetero_runtime.config import ResolvedConfig, load_config
from hetero_runtime.engine import Engine
from hetero_runtime.errors import DeviceError
from hetero_runtime.plan import Gpu, detect
from hetero_runtime.planned import three_residencies
from tests.gpu.fake_mapper import FakeMapper
from tests.runtime.engine.rest import Banks, assert_at_rest, engine_threads
from tests.runtime.engine.serving import Said, say

NUM_ROUTED = 48


@pytest.fixture
def board(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeMapper]:
    """A machine whose GPU is the CPU; afterwards all its mapped memory is given back."""
    mapper = FakeMapper()
    gpu = Gpu("a board", 1 << 40, 1 << 40, is_integrated=True)
    monkeypatch.setattr(planned, "detect", lambda device: replace(detect("cpu"), gpu=gpu))
    monkeypatch.setattr(ResolvedConfig, "torch_device", "cpu")
    monkeypatch.setattr(mapped, "CudaMapper", lambda: mapper)
    yield mapper
    assert mapper.allocated == {}
    assert engine_threads() == []


def _load(folder: Path, **memory: Any) -> Engine:
    return Engine.load(folder, device="unified", memory=memory)


def test_the_bank_is_what_is_computed_from(
    board: FakeMapper,
    packed_model: Path,
    packed_answers: Said,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    banks = Banks(monkeypatch)
    with _load(packed_model) as engine:
        assert banks.num_open == 0, "experts lie in one place"
        parts = engine._parts
        (pages,) = board.allocated.values()
        assert len(pages) == parts.store.bank_bytes == parts.slabs.num_bytes
        assert say(engine) == packed_answers
        stats = engine.stats()
        for phase in (stats.prefill, stats.decode):
            assert phase.cache.hit_rate == 1.0
            assert (phase.cache.loads, phase.cache.bytes_moved, phase.stall_s) == (0, 0, 0.0)
        assert_at_rest(engine)


@pytest.mark.parametrize("memory", [{"pinned_prefix": 1}, {"pool": "per_layer"}, {"slabs": "all"}])
def test_how_slabs_are_pooled_changes_nothing(
    board: FakeMapper, packed_model: Path, packed_answers: Said, memory: dict[str, Any]
) -> None:
    with _load(packed_model, **memory) as engine:
        assert say(engine) == packed_answers
        engine.check()


def test_it_is_filled_from_an_expert_file_too(
    board: FakeMapper, packed_model: Path, packed_answers: Said
) -> None:
    file = packed_model.with_name("model.experts.safetensors")
    with _load(packed_model, expert_file=str(file)) as engine:
        assert len(board.allocated) == 1
        assert say(engine) == packed_answers


@pytest.mark.parametrize("backing", ["direct", "mmap"])
@pytest.mark.parametrize("slabs", [4, 12, NUM_ROUTED])
def test_a_disk_reads_to_where_experts_are_computed(
    board: FakeMapper,
    packed_model: Path,
    packed_answers: Said,
    backing: str,
    slabs: int,
) -> None:
    with _load(packed_model, backing=backing, slabs=slabs) as engine:
        parts = engine._parts
        (pages,) = board.allocated.values()
        assert len(pages) == slabs * parts.store.layout.record_bytes, "no second copy in host memory"
        assert parts.supply.host is None
        assert say(engine) == packed_answers
        assert engine.stats().disk.reads > 0
        assert_at_rest(engine)


def test_policies_that_forecast_find_nothing_to_do(
    board: FakeMapper, packed_model: Path, packed_answers: Said
) -> None:
    eviction = {"policy": "belady"}
    prefetch = {"schedule": "edf", "extra": 2}
    with Engine.load(packed_model, device="unified", prefetch=prefetch, eviction=eviction) as engine:
        assert say(engine) == packed_answers
        assert engine.stats().decode.cache.prefetches == 0


def test_no_room_is_said_clearly_and_leaves_nothing(
    board: FakeMapper, packed_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mapped, "CudaMapper", lambda: FakeMapper(refuses=True))
    with pytest.raises(DeviceError, match=r"no room for .* of experts .*write memory\.backing: direct"):
        _load(packed_model)
    with pytest.raises(DeviceError, match=r"no room for 12 slabs .*lower memory\.slabs"):
        _load(packed_model, backing="direct", slabs=12)


def test_verify_compares_the_one_residency_there_is(board: FakeMapper, packed_model: Path) -> None:
    config = load_config({"model": {"path": str(packed_model)}})
    assert three_residencies(config) == [config]
    assert len(three_residencies(replace(config, device="cpu"))) == 3


@pytest.mark.gpu
@pytest.mark.parametrize(
    "memory", [{}, {"backing": "direct", "slabs": 12}, {"backing": "mmap", "slabs": 4}], ids=str
)
def test_a_graphics_card_plays_it(packed_model: Path, memory: dict[str, Any]) -> None:
    eager = {"mode": "eager"}  # as below, where nothing can be captured
    with Engine.load(packed_model, device="cuda", memory={"slabs": "all"}, execution=eager) as engine:
        expected = say(engine)
    with _load(packed_model, **memory) as engine:
        slabs = engine._parts.slabs
        assert slabs.memory.is_cuda
        assert say(engine) == expected
        assert_at_rest(engine)
        if not memory:
            assert engine.stats().decode.cache.bytes_moved == 0
