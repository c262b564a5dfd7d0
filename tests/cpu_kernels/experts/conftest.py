"""Pools of workers, and the amx target on machines without tiles."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator

import pytest

from hetero_cpu_kernels.experts import Target, is_executable, target, tile_registers
from hetero_cpu_kernels.experts import layer as layer_module
from hetero_cpu_kernels.pool import WorkerPool
from tests.cpu_kernels.experts import emulated_tiles


@pytest.fixture(scope="module")
def pools() -> Iterator[dict[int, WorkerPool]]:
    """By number of workers; they share processors where there are fewer."""
    cpus = sorted(os.sched_getaffinity(0))
    pools = {n: WorkerPool([cpus[i % len(cpus)] for i in range(n)], spins=100) for n in (1, 2, 3)}
    yield pools
    for pool in pools.values():
        pool.close()


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> Target:
    """All of the amx target but the tile instructions themselves, on any machine with AVX-512."""
    if not is_executable(target("avx512_bf16")):
        pytest.skip("the code around tiles needs AVX-512")
    emulated_tiles.install()
    monkeypatch.setattr(tile_registers, "_PREFIX", emulated_tiles.PREFIX)
    monkeypatch.setattr(layer_module, "request_amx", lambda: "")
    return dataclasses.replace(target("amx"), features=target("avx512_bf16").features, few_tokens=2)


@pytest.fixture(params=["emulated", "executed"])
def tiled(request: pytest.FixtureRequest) -> Target:
    """The amx target with tiles that are emulated, or this machine's."""
    if request.param == "emulated":
        entry: Target = request.getfixturevalue("emulated")
        return entry
    if not is_executable(target("amx")):
        pytest.skip("amx does not execute here: emulated")
    return dataclasses.replace(target("amx"), few_tokens=2)
