"""A disk that is slow for this process alone, by a control group. Needs root."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

MOUNT, DEVICES = Path("/sys/fs/cgroup"), Path("/sys/dev/block")


class ThrottledDisk:
    """The disk `device` (254:0) as the group at `folder` sees it."""

    def __init__(self, device: str, folder: Path, *, is_v1: bool) -> None:
        self._device, self.folder, self._is_v1 = device, folder, is_v1

    def set_rate(self, bytes_s: int) -> None:
        if self._is_v1:
            self._write("blkio.throttle.read_bps_device", f"{self._device} {bytes_s}")
        else:
            self._write("io.max", f"{self._device} rbps={bytes_s}")

    def read_bytes(self) -> int:
        """Bytes that this process has read from the disk so far, around the page cache or not."""
        name, words = ("blkio.throttle.io_service_bytes", 3) if self._is_v1 else ("io.stat", 2)
        for line in (self.folder / name).read_text().splitlines():
            fields = line.split()
            if fields[0] == self._device and words == 2:
                return int(dict(field.split("=") for field in fields[1:])["rbytes"])
            if fields[:2] == [self._device, "Read"]:
                return int(fields[2])
        return 0

    def _write(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text)


@contextmanager
def throttled_disk(folder: Path, bytes_s: int) -> Iterator[ThrottledDisk]:
    """Inside, this process reads the disk of `folder` at no more than `bytes_s`. Skips the test where that
    cannot be."""
    if os.geteuid() != 0:
        pytest.skip("control groups are made by root")
    device = _disk_of(folder)
    is_v1 = (MOUNT / "blkio").is_dir()
    controllers = MOUNT / "cgroup.controllers"
    if not is_v1 and (not controllers.exists() or "io" not in controllers.read_text().split()):
        pytest.skip("no control group throttles disks here")
    home = MOUNT / "blkio" if is_v1 else MOUNT
    disk = ThrottledDisk(device, home / f"hetero-test-{os.getpid()}", is_v1=is_v1)
    before = _own_group(home, is_v1=is_v1)
    with ExitStack() as undo:
        try:
            if not is_v1:
                (home / "cgroup.subtree_control").write_text("+io")
            disk.folder.mkdir()
            undo.callback(disk.folder.rmdir)
            disk.set_rate(bytes_s)
            move(disk.folder)
            undo.callback(move, before)
        except OSError as error:
            pytest.skip(f"control groups cannot be used here: {error}")
        yield disk


def move(group: Path) -> None:
    """Put this process into the control group at `group`."""
    (group / "cgroup.procs").write_text(str(os.getpid()))


def _disk_of(folder: Path) -> str:
    """`254:0`: the whole disk, if a part of one holds `folder`."""
    number = folder.stat().st_dev
    entry = DEVICES / f"{os.major(number)}:{os.minor(number)}"
    if not entry.exists():
        pytest.skip(f"{folder} lies on no disk")
    place = entry.resolve()
    return ((place.parent if (place / "partition").exists() else place) / "dev").read_text().strip()


def _own_group(home: Path, *, is_v1: bool) -> Path:
    """Where this process is now."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        number, controllers, path = line.split(":", 2)
        if ("blkio" in controllers.split(",")) if is_v1 else number == "0":
            return home / path.lstrip("/")
    return home
