"""The world fails while a model loads: one clear error, everything given back, and the next load works."""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from hetero_runtime.engine import Engine
from hetero_runtime.errors import CheckpointError, DeviceError
from tests.runtime.engine.conftest import MakeCheckpoint
from tests.runtime.engine.rest import Banks

MODEL = "Qwen3Moe"


def load(folder: Path, device: str = "cpu", **overrides: Any) -> Engine:
    return Engine.load(folder, device=device, execution={"mode": "eager"}, **overrides)


def assert_loads(folder: Path, device: str = "cpu") -> None:
    with load(folder, device) as engine:
        assert len(engine.generate("hi", max_tokens=4, ignore_eos=True).token_ids) == 4


@pytest.mark.parametrize("num_good_reads", [0, 3])
def test_a_read_that_fails_in_the_middle(
    num_good_reads: int, checkpoint: MakeCheckpoint, banks: Banks, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads_left, read = num_good_reads, os.preadv

    def failing(*arguments: Any) -> int:
        nonlocal reads_left
        reads_left -= 1
        if reads_left < 0:
            raise OSError(5, "Input/output error")
        return read(*arguments)

    monkeypatch.setattr(os, "preadv", failing)
    with pytest.raises(
        CheckpointError, match=r"model-.*: reading \d+ bytes at offset \d+ failed: Input/output"
    ):
        load(checkpoint(MODEL), cpu={"threads": 2})
    assert banks.num_made == 1
    monkeypatch.undo()
    assert_loads(checkpoint(MODEL))


def test_no_memory_for_the_bank(
    checkpoint: MakeCheckpoint, banks: Banks, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = mmap.mmap

    def refusing(descriptor: int, *arguments: Any, **options: Any) -> mmap.mmap:
        if descriptor == -1:
            raise OSError(12, "Cannot allocate memory")
        return make(descriptor, *arguments, **options)

    monkeypatch.setattr(mmap, "mmap", refusing)
    with pytest.raises(
        DeviceError, match=r"the host refused 0.0 GB for the experts \(Cannot allocate memory\)"
    ):
        load(checkpoint(MODEL))
    assert banks.num_made == 0


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            RuntimeError(
                "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9"
            ),
            r"the host has no room for 7 slabs of 0.0 MB .* \(.*tried to allocate 9\); lower memory.slabs",
        ),
        (
            MemoryError(),
            r"the host has no room for 7 slabs .*\(MemoryError\); lower memory.slabs \(or memory.resid",
        ),
    ],
    ids=["torch", "python"],
)
def test_no_memory_for_the_slabs(
    error: Exception, message: str, checkpoint: MakeCheckpoint, banks: Banks, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_slabs(monkeypatch, 7, error)
    with pytest.raises(DeviceError, match=message):
        load(checkpoint(MODEL), memory={"slabs": 7})
    assert banks.num_made == 1


def test_no_memory_for_the_backbone(
    checkpoint: MakeCheckpoint, banks: Banks, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refusing(*_: Any, **__: Any) -> None:
        raise MemoryError("out of it")

    monkeypatch.setattr("hetero_runtime.assembly.load_backbone", refusing)
    with pytest.raises(
        DeviceError, match=r"no room for the weights that are no routed experts \(out of it\)"
    ):
        load(checkpoint(MODEL))
    assert banks.num_made == 0


@pytest.fixture
def warm_cuda(checkpoint: MakeCheckpoint) -> None:
    """What CUDA opens once for the process is open before `banks` counts."""
    assert_loads(checkpoint(MODEL), "cuda")


@pytest.mark.gpu
@pytest.mark.usefixtures("warm_cuda")
def test_no_memory_for_the_slabs_on_the_gpu(
    checkpoint: MakeCheckpoint, banks: Banks, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_slabs(monkeypatch, 7, torch.OutOfMemoryError("CUDA out of memory"))
    with pytest.raises(
        DeviceError, match=r"cuda.* has no room for 7 slabs .*: \d.* GB are free; lower memory.slab"
    ):
        load(checkpoint(MODEL), "cuda", memory={"slabs": 7})
    assert banks.num_made == 1
    monkeypatch.undo()
    assert_loads(checkpoint(MODEL), "cuda")


def refuse_slabs(monkeypatch: pytest.MonkeyPatch, num_slabs: int, error: Exception) -> None:
    """`torch.empty` fails for the slabs, and for nothing else."""
    empty = torch.empty

    def refusing(*size: Any, **options: Any) -> torch.Tensor:
        if size and isinstance(size[0], tuple) and size[0][:1] == (num_slabs,):
            raise error
        return empty(*size, **options)

    monkeypatch.setattr(torch, "empty", refusing)
