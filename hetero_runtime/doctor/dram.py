"""Memory as the CPU reads it: the roof of every expert that is computed where it lies."""

from __future__ import annotations

from pathlib import Path

from hetero_cpu_kernels.bandwidth import dram_read_gb_s
from hetero_cpu_kernels.topology import Node, Topology
from hetero_runtime.doctor.base import EXPERT, Finding, expert_ms
from hetero_runtime.doctor.cores import this_machine


def check(folder: Path) -> list[Finding]:
    """All worker threads together, then each NUMA node by its own cores where there are several."""
    topology = this_machine()
    threads = topology.worker_threads
    gb_s = dram_read_gb_s(threads)
    meaning = f"the CPU computes {EXPERT} for one token in {expert_ms(gb_s):.2f} ms at best"
    whole = Finding(f"DRAM read, {threads} threads", round(gb_s, 1), "GB/s", "ok", meaning)
    if len(topology.nodes) == 1:
        return [whole]
    return [whole, *(_node(topology, node) for node in topology.nodes)]


def _node(topology: Topology, node: Node) -> Finding:
    cpus = topology.core_heads(node)[: topology.worker_threads]
    gb_s = dram_read_gb_s(len(cpus), cpus=cpus)
    meaning = f"what {len(cpus)} cores of node {node.number} read from their own memory"
    return Finding(f"DRAM read, node {node.number}", round(gb_s, 1), "GB/s", "ok", meaning)
