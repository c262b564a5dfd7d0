"""Cores, SMT siblings, NUMA nodes and the last-level cache, as far as this process may use them.

Expert kernels are bound by memory: a second thread on the same core adds nothing, a thread on the other
socket reads through the slower path, and a thread more than the container's quota stalls all others.
`Topology.worker_threads` is the number that avoids all three.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Node:
    """One NUMA node: memory and the processors next to it."""

    number: int
    cpus: tuple[int, ...]


@dataclass(frozen=True)
class Topology:
    """The processors that this process may run on."""

    cores: tuple[tuple[int, ...], ...]
    """Logical processors of each physical core, ascending."""
    nodes: tuple[Node, ...]
    """NUMA nodes that hold at least one of these processors."""
    quota: float | None
    """Processors' worth of time that the container grants; None without a limit."""
    online: int
    """Logical processors of the machine, allowed or not."""
    cache_bytes: int
    """Sum of the last-level caches of these processors; 0 when the kernel does not say."""

    @property
    def cpus(self) -> tuple[int, ...]:
        """Logical processors that this process may run on, ascending."""
        return tuple(sorted(cpu for core in self.cores for cpu in core))

    @property
    def worker_threads(self) -> int:
        """Threads for kernels: one a physical core, no more than the quota grants, at least one."""
        granted = len(self.cores) if self.quota is None else math.floor(self.quota)
        return max(1, min(len(self.cores), granted))

    def core_heads(self, node: Node) -> tuple[int, ...]:
        """The first logical processor of each physical core of a node."""
        return tuple(core[0] for core in self.cores if core[0] in node.cpus)


def read_topology(
    *, root: Path = Path("/"), allowed: Iterable[int] | None = None, quota: float | None = None
) -> Topology:
    """Read the topology from `root`/sys.

    `allowed` are the logical processors of this process (None: its affinity); `quota` is what the
    container grants, which the caller knows. Where the kernel does not tell siblings or nodes, each
    processor counts as a core and all of them as node 0.
    """
    system = root / "sys" / "devices" / "system"
    folder = system / "cpu"
    cpus = sorted(_affinity() if allowed is None else set(allowed))
    siblings = {cpu: _siblings(folder / f"cpu{cpu}") or (cpu,) for cpu in cpus}
    cores = {tuple(cpu for cpu in group if cpu in siblings) for group in siblings.values()}
    online = folder / "online"
    return Topology(
        cores=tuple(sorted(cores)),
        nodes=_nodes(system / "node", cpus),
        quota=quota,
        online=len(parse_cpu_list(online.read_text())) if online.exists() else len(cpus),
        cache_bytes=_cache_bytes(folder, cpus),
    )


def parse_cpu_list(text: str) -> tuple[int, ...]:
    """Numbers of a kernel list such as `0-3,8,10-11`; an empty list gives an empty tuple."""
    numbers: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        numbers.extend(range(int(first), int(last or first) + 1))
    return tuple(numbers)


def _affinity() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def _siblings(cpu: Path) -> tuple[int, ...]:
    listing = cpu / "topology" / "thread_siblings_list"
    return parse_cpu_list(listing.read_text()) if listing.exists() else ()


def _nodes(listing: Path, cpus: list[int]) -> tuple[Node, ...]:
    nodes = []
    for folder in listing.glob("node[0-9]*"):
        local = set(parse_cpu_list((folder / "cpulist").read_text())).intersection(cpus)
        if local:
            nodes.append(Node(int(folder.name.removeprefix("node")), tuple(sorted(local))))
    return tuple(sorted(nodes, key=lambda node: node.number)) or (Node(0, tuple(cpus)),)


def _cache_bytes(folder: Path, cpus: list[int]) -> int:
    """Sum over the distinct caches of the highest level."""
    levels: dict[int, dict[str, int]] = {}
    for cpu in cpus:
        for cache in (folder / f"cpu{cpu}" / "cache").glob("index[0-9]*"):
            files = [cache / name for name in ("level", "size", "shared_cpu_list")]
            if all(file.exists() for file in files):
                level, size, shared = (file.read_text().strip() for file in files)
                levels.setdefault(int(level), {})[shared] = _size_bytes(size)
    return sum(levels[max(levels)].values()) if levels else 0


def _size_bytes(text: str) -> int:
    """Bytes of a size as the kernel writes it: `32768K`, `32M`, `512`."""
    factor = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(text[-1:], 1)
    return int(text.rstrip("KMG")) * factor
