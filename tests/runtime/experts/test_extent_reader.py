"""Reading extents both ways, refusals and failures, and the choice between the two ways."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from hetero_runtime.errors import CheckpointError
from hetero_runtime.experts.extent_reader import (
    DIRECT_ALIGN,
    DirectRefused,
    ExtentReader,
    PathChoice,
    ReadPath,
    scatter,
)
from hetero_runtime.experts.reads import Extent, Read, Scatter, group_reads

FILE_BYTES = 3 * DIRECT_ALIGN + 77


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file of random bytes whose length is no multiple of anything."""
    path = tmp_path / "data"
    path.write_bytes(np.random.default_rng(0).bytes(FILE_BYTES))
    return path


@pytest.fixture
def bank() -> torch.Tensor:
    return torch.zeros(4 * DIRECT_ALIGN, dtype=torch.uint8)


@pytest.fixture
def reader(bank: torch.Tensor) -> Iterator[ExtentReader]:
    reader = ExtentReader(bank, scratch_bytes=4 * DIRECT_ALIGN)
    yield reader
    reader.close()


def _is_refused(path: Path) -> bool:
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_DIRECT))
    except OSError:
        return True
    return False


@pytest.mark.parametrize("path", list(ReadPath))
def test_unaligned_pieces_land_where_they_belong(
    path: ReadPath, file: Path, bank: torch.Tensor, reader: ExtentReader
) -> None:
    if path is ReadPath.DIRECT and _is_refused(file):
        pytest.skip(f"{file.parent} does not do direct reads")
    matrix = Read(file, 5000, 6 * 4 * 2, 8000, Scatter((6, 4), (1, 6), 2))
    reads = [Read(file, 3, 4500, 1, None), matrix, Read(file, FILE_BYTES - 10, 10, 9000, None)]
    for extent in group_reads(reads, 4 * DIRECT_ALIGN):
        reader.read(extent, path)
    data = np.frombuffer(file.read_bytes(), dtype=np.uint8)
    assert np.array_equal(bank[1:4501].numpy(), data[3:4503])
    assert np.array_equal(bank[9000:9010].numpy(), data[-10:])
    expected = data[5000:5048].view(np.int16).reshape(6, 4).T
    assert np.array_equal(bank[8000:8048].numpy().view(np.int16).reshape(4, 6), expected)
    assert not bank[4501:8000].any()


@pytest.mark.parametrize("path", list(ReadPath))
def test_a_file_that_ends_early_is_one_clear_error(path: ReadPath, file: Path, reader: ExtentReader) -> None:
    if path is ReadPath.DIRECT and _is_refused(file):
        pytest.skip(f"{file.parent} does not do direct reads")
    extent = Extent(file, (Read(file, FILE_BYTES - 10, 30, 0, None),))
    with pytest.raises(CheckpointError, match=f"{file}: ends at byte {FILE_BYTES}, 20 bytes early"):
        reader.read(extent, path)


def test_a_failing_disk_is_named_with_file_and_offset(
    file: Path, reader: ExtentReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(CheckpointError, match=f"{file}: reading 20 bytes at offset 7 failed: Input/output"):
        reader.read(Extent(file, (Read(file, 7, 20, 0, None),)), ReadPath.BUFFERED)


def test_a_file_system_without_direct_reads_is_an_answer(
    file: Path, reader: ExtentReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(DirectRefused):
        reader.read(Extent(file, (Read(file, 7, 20, 0, None),)), ReadPath.DIRECT)


@pytest.mark.parametrize("itemsize", [1, 2, 4, 8])
@pytest.mark.parametrize("lead", [0, 1])
def test_scatter_moves_elements_of_any_size_from_any_address(itemsize: int, lead: int) -> None:
    raw = torch.randint(0, 256, (lead + 15 * itemsize,), dtype=torch.uint8)[lead:]
    bank = torch.zeros(256, dtype=torch.uint8)
    scatter(raw, bank, Read(Path(), 0, raw.numel(), 64, Scatter((3, 5), (1, 3), itemsize)))
    expected = raw.view(3, 5, itemsize).transpose(0, 1).reshape(-1)
    assert torch.equal(bank[64 : 64 + raw.numel()], expected)
    assert not bank[:64].any()


class TestPathChoice:
    """Which way the next extent is read."""

    def test_probes_both_ways_then_takes_the_faster(self) -> None:
        choice = PathChoice(num_probes=2)
        paths = [choice.next() for _ in range(4)]
        assert paths == [ReadPath.DIRECT, ReadPath.DIRECT, ReadPath.BUFFERED, ReadPath.BUFFERED]
        for path in paths:
            slowness = 1.0 if path is ReadPath.DIRECT else 0.1
            choice.observe(path, 1000, time.perf_counter() - slowness)
        assert choice.next() is ReadPath.BUFFERED

    def test_is_direct_until_both_are_measured(self) -> None:
        choice = PathChoice(num_probes=1)
        assert [choice.next() for _ in range(3)] == [ReadPath.DIRECT, ReadPath.BUFFERED, ReadPath.DIRECT]

    def test_a_refusal_settles_it(self) -> None:
        choice = PathChoice(num_probes=3)
        choice.refuse_direct()
        assert choice.next() is ReadPath.BUFFERED

    @pytest.mark.parametrize("path", list(ReadPath))
    def test_a_fixed_way_is_kept(self, path: ReadPath) -> None:
        choice = PathChoice(num_probes=1, fixed=path)
        assert {choice.next() for _ in range(5)} == {path}
