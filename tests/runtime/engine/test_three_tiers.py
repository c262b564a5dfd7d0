"""A disk, host memory and a device at once: the device is played by the host, or is a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hetero_runtime import planned
from hetero_runtime.config import ResolvedConfig
from hetero_runtime.engine import Engine
from hetero_runtime.errors import CheckpointError, RequestError
from hetero_runtime.expert_file.stored import StoredRecords
from hetero_runtime.plan import Gpu, detect
from hetero_runtime.tiers import reading
from tests.runtime.engine.rest import assert_at_rest, engine_threads
from tests.runtime.engine.serving import Said, say

TOP_K, NUM_ROUTED = 4, 48


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine with a graphics card that is its CPU; afterwards no thread of an engine is left."""
    gpu = Gpu("a card", 1 << 40, 1 << 40)
    monkeypatch.setattr(planned, "detect", lambda device: replace(detect("cpu"), gpu=gpu))
    monkeypatch.setattr(ResolvedConfig, "torch_device", "cpu")
    monkeypatch.setattr(reading, "RETRY_PAUSES_S", (0.0,))
    yield
    assert engine_threads() == []


def _load(folder: Path, *, slabs: int, memory: dict[str, Any] | None = None, **overrides: Any) -> Engine:
    below = {"backing": "direct", "slabs": slabs, **(memory or {})}
    return Engine.load(folder, device="cuda", memory=below, **overrides)


def _assert_tiers_at_rest(engine: Engine) -> None:
    engine.check()
    host = engine._parts.supply.host
    assert host is not None
    host.copier.synchronize()
    host.cache.check()
    assert host.cache.num_available(0) == host.cache.pool_size(0), "a host slab is held by nobody"


@pytest.mark.parametrize("slabs", [TOP_K, 12, 30])
@pytest.mark.parametrize("host_slabs", [TOP_K, 12, 24, NUM_ROUTED])
def test_what_lies_where_changes_no_token(
    card: None, packed_model: Path, packed_answers: Said, slabs: int, host_slabs: int
) -> None:
    with _load(packed_model, slabs=slabs, memory={"host_slabs": host_slabs}) as engine:
        assert say(engine) == packed_answers
        disk, cache = engine.stats().disk, engine.stats().prefill.cache + engine.stats().decode.cache
        assert disk.num_bytes == disk.reads * engine._parts.store.stored_bytes
        assert disk.reads + disk.spared >= cache.misses
        if slabs + host_slabs >= NUM_ROUTED + 2 * TOP_K:
            assert disk.reads <= NUM_ROUTED, "what fits into both is read once"
        assert_at_rest(engine)
        _assert_tiers_at_rest(engine)


@pytest.mark.parametrize(
    "overrides",
    [
        {"memory": {"backing": "mmap"}},
        {"memory": {"pinned_prefix": 1}},
        {"memory": {"pool": "per_layer"}},
        {"eviction": {"policy": "lfru"}},
        {"prefetch": {"schedule": "edf", "extra": 4}, "eviction": {"policy": "belady"}},
    ],
    ids=str,
)
def test_policies_change_no_token(
    card: None, packed_model: Path, packed_answers: Said, overrides: dict[str, Any]
) -> None:
    with _load(packed_model, slabs=15, **overrides) as engine:
        assert say(engine) == packed_answers
        _assert_tiers_at_rest(engine)


def test_a_disk_that_breaks_fails_requests_and_the_engine_serves_on(
    card: None, packed_model: Path, packed_answers: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(stored: StoredRecords, position: int, into: Any, *, is_checked: bool = True) -> None:
        raise CheckpointError(f"reading record {position} failed: Input/output error")

    with _load(packed_model, slabs=12, memory={"host_slabs": 16}) as engine:
        assert say(engine) == packed_answers
        for _ in range(3):
            with monkeypatch.context() as failing:
                failing.setattr(StoredRecords, "read", broken)
                with pytest.raises(RequestError, match="Input/output error"):
                    say(engine)
            _assert_tiers_at_rest(engine)
            assert say(engine) == packed_answers


@pytest.mark.gpu
@pytest.mark.parametrize("host_slabs", [TOP_K, 16, NUM_ROUTED])
def test_on_a_gpu(packed_model: Path, host_slabs: int) -> None:
    eager = {"mode": "eager"}  # as below, where nothing can be captured
    with Engine.load(packed_model, device="cuda", memory={"slabs": "all"}, execution=eager) as engine:
        expected = say(engine)
    with _load(packed_model, slabs=12, memory={"host_slabs": host_slabs}) as engine:
        assert engine._parts.slabs.memory.is_cuda
        assert say(engine) == expected
        _assert_tiers_at_rest(engine)
