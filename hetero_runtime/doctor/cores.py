"""Cores, SMT, NUMA and the CPU quota: how many threads the CPU side starts, and where."""

from __future__ import annotations

from pathlib import Path

from hetero_cpu_kernels.topology import Topology, read_topology
from hetero_runtime.doctor.base import Finding
from hetero_runtime.plan.cgroup import read_limits


def check(folder: Path) -> list[Finding]:
    """Read the topology of this machine, as far as this process may use it."""
    return judge(this_machine())


def this_machine() -> Topology:
    """The topology of this machine, with the CPU quota of its control groups."""
    return read_topology(quota=read_limits().cpus)


def judge(topology: Topology) -> list[Finding]:
    """Findings for a topology."""
    return [_cores(topology), *_affinity(topology), *_quota(topology), _nodes(topology)]


def _cores(topology: Topology) -> Finding:
    meaning = f"`cpu.threads: auto` starts {topology.worker_threads} threads, one a physical core"
    siblings = len(topology.cpus) - len(topology.cores)
    if siblings:
        meaning += f"; the {siblings} SMT siblings share a core's memory path and add nothing to decode"
    return Finding("physical cores", len(topology.cores), "", "ok", meaning)


def _affinity(topology: Topology) -> list[Finding]:
    allowed = len(topology.cpus)
    if allowed == topology.online:
        return []
    meaning = f"this process may use {allowed} of {topology.online} logical processors (taskset, cpuset)"
    return [Finding("affinity", allowed, "", "warn", meaning)]


def _quota(topology: Topology) -> list[Finding]:
    if topology.quota is None:
        return []
    meaning = f"the container grants {topology.quota:g} processors' worth of time"
    if topology.quota >= len(topology.cpus):
        return [Finding("CPU quota", topology.quota, "cpus", "ok", f"{meaning}: no limit in practice")]
    meaning += f": more than {topology.worker_threads} threads would be stopped in the middle of a layer"
    return [Finding("CPU quota", topology.quota, "cpus", "warn", meaning)]


def _nodes(topology: Topology) -> Finding:
    count = len(topology.nodes)
    if count == 1:
        return Finding("NUMA nodes", 1, "", "ok", "all memory is equally near: nothing to place")
    listing = ", ".join(f"node {node.number}: {len(node.cpus)} cpus" for node in topology.nodes)
    meaning = (
        f"{listing}; experts read from the far node are slower: start under `numactl --cpunodebind=N "
        "--membind=N` when the bank fits in one node, `--interleave=all` when it does not"
    )
    return Finding("NUMA nodes", count, "", "warn", meaning)
