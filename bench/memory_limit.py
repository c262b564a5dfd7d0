"""A control group with a memory limit, and swap on a file: what a machine with too little memory is like.

Both need root. Version 1 and version 2 of control groups; swap is not limited.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

MOUNT = Path("/sys/fs/cgroup")


class Files(NamedTuple):
    """Names in one version of control groups."""

    limit: str
    peak: str
    events: str


V1 = Files("memory.limit_in_bytes", "memory.max_usage_in_bytes", "memory.oom_control")
V2 = Files("memory.max", "memory.peak", "memory.events")


class LimitedGroup:
    """A control group that holds at most `limit_bytes`, page cache included."""

    def __init__(self, folder: Path, files: Files, limit_bytes: int) -> None:
        self.folder, self._files, self.limit_bytes = folder, files, limit_bytes
        folder.mkdir()
        (folder / files.limit).write_text(str(limit_bytes), encoding="ascii")

    def join(self) -> None:
        """Put this process into the group."""
        join(self.folder)

    @property
    def peak_bytes(self) -> int:
        """The most that was held at once."""
        return int((self.folder / self._files.peak).read_text(encoding="ascii"))

    @property
    def num_killed(self) -> int:
        """Processes that the kernel killed for memory."""
        lines = (self.folder / self._files.events).read_text(encoding="ascii").splitlines()
        return int(dict(line.split() for line in lines)["oom_kill"])


def join(folder: Path) -> None:
    """Put this process into the control group at `folder`; what it takes from now on counts there."""
    (folder / "cgroup.procs").write_text(str(os.getpid()), encoding="ascii")


@contextmanager
def limited_group(name: str, limit_bytes: int) -> Iterator[LimitedGroup]:
    """A group of that name, empty again when the context is left. Raises OSError where it may not be made."""
    is_v1 = (MOUNT / "memory").is_dir()
    if not is_v1:
        (MOUNT / "cgroup.subtree_control").write_text("+memory", encoding="ascii")
    group = LimitedGroup((MOUNT / "memory" if is_v1 else MOUNT) / name, V1 if is_v1 else V2, limit_bytes)
    try:
        yield group
    finally:
        group.folder.rmdir()


@contextmanager
def swap_on(file: Path, num_bytes: int) -> Iterator[None]:
    """Swap on `file`, which is made and deleted. Raises CalledProcessError where that is refused."""
    descriptor = os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, num_bytes)
    finally:
        os.close(descriptor)
    try:
        subprocess.run(["mkswap", file], check=True, capture_output=True)
        subprocess.run(["swapon", file], check=True, capture_output=True)
        try:
            yield
        finally:
            subprocess.run(["swapoff", file], check=True, capture_output=True)
    finally:
        file.unlink()
