"""Limits of the control groups that this process is in: containers, batch systems, systemd slices.

A limit of any ancestor binds, so each hierarchy is walked from the process's own group to the root.
Inside a container the path in /proc/self/cgroup may not exist below the mount: the walk then meets only
the groups that do exist. Sources: kernel docs admin-guide/cgroup-v1/memory.rst and cgroup-v2.rst.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_UNLIMITED = 1 << 60
"""Version 1 writes "no limit" as a number near 2^63."""


@dataclass(frozen=True)
class CgroupLimits:
    """The tightest limits found; None where there is none."""

    memory_bytes: int | None
    """Limit on memory."""
    memory_free_bytes: int | None
    """What can still be taken under the tightest group: page cache in its usage counts as free."""
    cpus: float | None
    """CPU time a second of wall time, in cores."""


def read_limits(root: Path = Path("/")) -> CgroupLimits:
    """Limits from `root`/proc/self/cgroup and `root`/sys/fs/cgroup. No such files: no limits."""
    limits, frees, quotas = [], [], []
    for version, group in _groups(root):
        memory = _memory_v2(group) if version == 2 else _memory_v1(group)
        if memory is not None:
            limits.append(memory[0])
            frees.append(memory[1])
        quota = _quota_v2(group) if version == 2 else _quota_v1(group)
        if quota is not None:
            quotas.append(quota)
    return CgroupLimits(min(limits, default=None), min(frees, default=None), min(quotas, default=None))


def usable_cpus(limits: CgroupLimits, affinity: int) -> int:
    """Whole cores that `affinity` and the quota leave; at least one."""
    return affinity if limits.cpus is None else max(1, min(affinity, math.floor(limits.cpus)))


def memory_pressure_files(root: Path = Path("/")) -> list[Path]:
    """Where the kernel tells how long tasks waited for memory: of this process's own group first."""
    groups = [folder / "memory.pressure" for version, folder in _groups(root) if version == 2]
    return [*groups[:1], root / "proc/pressure/memory"]


def _groups(root: Path) -> Iterator[tuple[int, Path]]:
    """(version, folder) of this process's groups and of all their ancestors that exist."""
    mount = root / "sys/fs/cgroup"
    listing = _read(root / "proc/self/cgroup") or ""
    for line in listing.splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            for base in (mount, mount / "unified"):
                yield from ((2, folder) for folder in _up_to(base, path))
        for controller in set(controllers.split(",")) & {"memory", "cpu"}:
            yield from ((1, folder) for folder in _up_to(mount / controller, path))


def _up_to(base: Path, path: str) -> Iterator[Path]:
    folder = base / path.lstrip("/")
    for candidate in (folder, *folder.parents):
        if candidate.is_dir():
            yield candidate
        if candidate == base:
            return


def _memory_v2(group: Path) -> tuple[int, int] | None:
    return _memory(group / "memory.max", group / "memory.current", group / "memory.stat", "inactive_file")


def _memory_v1(group: Path) -> tuple[int, int] | None:
    return _memory(
        group / "memory.limit_in_bytes",
        group / "memory.usage_in_bytes",
        group / "memory.stat",
        "total_inactive_file",
    )


def _memory(limit_file: Path, usage_file: Path, stat_file: Path, cache_key: str) -> tuple[int, int] | None:
    """(limit, still free) in bytes of one group, None when it has no limit."""
    limit = _number(_read(limit_file))
    if limit is None or limit >= _UNLIMITED:
        return None
    usage = _number(_read(usage_file)) or 0
    stat = dict(line.split(" ", 1) for line in (_read(stat_file) or "").splitlines() if " " in line)
    cache = _number(stat.get(cache_key)) or 0
    return limit, max(0, limit - max(0, usage - cache))


def _quota_v2(group: Path) -> float | None:
    words = (_read(group / "cpu.max") or "").split()
    if len(words) != 2 or words[0] == "max":
        return None
    return int(words[0]) / int(words[1])


def _quota_v1(group: Path) -> float | None:
    quota = _number(_read(group / "cpu.cfs_quota_us"))
    period = _number(_read(group / "cpu.cfs_period_us"))
    return None if quota is None or not period else quota / period


def _number(text: str | None) -> int | None:
    """A number of 0 or more; None for an absent file, `max` and -1, which all mean no limit."""
    text = (text or "").strip()
    return int(text) if text.isdigit() else None


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="ascii")
    except OSError:
        return None
