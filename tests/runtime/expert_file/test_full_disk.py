"""Packing to a small file system that is full, or becomes so meanwhile."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from hetero_runtime.errors import DeviceError
from hetero_runtime.expert_file import ExpertFile
from tests.runtime.expert_file.packing import pack_to

Mount = Callable[[int], Path]


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Mount]:
    """`mount(n)`: the folder of a file system of its own that holds n bytes."""
    if os.geteuid() != 0:
        pytest.skip("file systems are mounted by root")
    with ExitStack() as undo:

        def make(num_bytes: int) -> Path:
            place = tmp_path / "small"
            place.mkdir()
            command = ["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs", str(place)]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                pytest.skip(f"nothing can be mounted here: {done.stderr.strip()}")
            undo.callback(subprocess.run, ["umount", str(place)], check=True)
            return place

        yield make


def fill(folder: Path) -> None:
    """Write to `folder` until it takes no more."""
    free = os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize
    with (folder / "others").open("wb", buffering=0) as file:
        assert file.write(bytes(free)) == free
        with pytest.raises(OSError, match="No space left"):
            file.write(bytes(4096))


def test_too_small_a_disk_is_named_and_left_empty(folder: Path, packed: Path, mount: Mount) -> None:
    place = mount(packed.stat().st_size // 2)
    with pytest.raises(DeviceError, match=r"small/a\.experts: needs .* free .*No space left on device"):
        pack_to(folder, place / "a.experts")
    assert os.listdir(place) == []


def test_a_disk_that_others_fill_meanwhile_is_no_matter(folder: Path, packed: Path, mount: Mount) -> None:
    place = mount(packed.stat().st_size + (1 << 20))
    is_full = False

    def others(done: int, total: int) -> None:
        nonlocal is_full
        if not is_full:
            fill(place)
            is_full = True
            assert os.statvfs(place).f_bavail == 0

    pack_to(folder, place / "a.experts", progress=others)
    assert is_full
    with ExpertFile.open(place / "a.experts") as file:
        file.verify()
    assert sorted(os.listdir(place)) == ["a.experts", "others"]
