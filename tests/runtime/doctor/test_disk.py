"""Direct reads of a weight file or a temporary one, and what happens where they are refused."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from hetero_runtime.doctor import disk
from hetero_runtime.doctor.disk import BLOCK_BYTES, check, direct_read_gb_s

pytestmark = pytest.mark.skipif(not hasattr(os, "O_DIRECT"), reason="this system has no direct reads")


@pytest.fixture(autouse=True)
def _small_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "_SAMPLE_BYTES", 2 * BLOCK_BYTES)


def refuse(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def direct(file: Path) -> float:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(disk, "direct_read_gb_s", direct)


def test_a_temporary_file_leaves_nothing_behind(tmp_path: Path) -> None:
    (finding,) = check(tmp_path)
    assert (finding.name, list(tmp_path.iterdir())) == ("disk, direct", [])
    assert "60 GB of experts load in" in finding.meaning or "direct reads are refused" in finding.meaning


def test_the_largest_weight_file_is_read_instead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in (("a", 16), ("b", 3 * BLOCK_BYTES), ("c", BLOCK_BYTES)):
        (tmp_path / f"{name}.safetensors").write_bytes(bytes(size))
    read: list[Path] = []

    def measured(file: Path) -> float:
        read.append(file)
        return 2.0

    monkeypatch.setattr(disk, "direct_read_gb_s", measured)
    (finding,) = check(tmp_path / "a.safetensors")
    assert read == [tmp_path / "b.safetensors"]
    assert finding.meaning == "60 GB of experts load in 30 s; an expert of 9.4 MB takes 4.7 ms"


def test_refused_direct_reads_are_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse(monkeypatch, errno.EINVAL)
    (finding,) = check(tmp_path)
    assert (finding.status, finding.value) == ("warn", None)
    assert f"direct reads are refused in {tmp_path} (Invalid argument)" in finding.meaning


def test_a_folder_that_takes_no_file_is_absent(tmp_path: Path) -> None:
    (finding,) = check(tmp_path / "gone" / "model")
    assert finding.status == "absent"
    assert "No such file or directory" in finding.meaning


def test_every_block_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "weights"
    file.write_bytes(bytes(5 * BLOCK_BYTES + 17))
    offsets: list[int] = []
    read = os.preadv

    def recorded(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        offsets.append(offset)
        return read(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", recorded)
    monkeypatch.setattr(os, "O_DIRECT", 0)  # a file system of the test's host may refuse it
    assert direct_read_gb_s(file, threads=3, seconds=30.0) > 0
    assert sorted(offsets) == [block * BLOCK_BYTES for block in range(5)]


def test_a_file_without_a_block_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "tiny").write_bytes(b"x")
    with pytest.raises(ValueError, match="is shorter than"):
        direct_read_gb_s(tmp_path / "tiny")
