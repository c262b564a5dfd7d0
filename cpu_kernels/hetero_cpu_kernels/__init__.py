"""CPU side of the runtime: what this processor executes, how fast it reads memory, experts computed on it.

    isa.probe_isa()                  instruction sets, each tried in a child process
    topology.read_topology()         cores, SMT siblings, NUMA nodes
    bandwidth.dram_read_gb_s(n)      GB/s that n threads read from memory
    pool.WorkerPool.create()         threads that wait for compiled jobs
    experts.CpuExperts(form, pool)   a layer's experts, computed where their records lie

The face stays light: numba is imported only when a name of `bandwidth` is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hetero_cpu_kernels.isa import InstructionSet, executes, probe_isa
from hetero_cpu_kernels.topology import Topology, read_topology

if TYPE_CHECKING:
    from hetero_cpu_kernels.bandwidth import dram_read_gb_s

__all__ = ["InstructionSet", "Topology", "dram_read_gb_s", "executes", "probe_isa", "read_topology"]


def __getattr__(name: str) -> Any:
    if name == "dram_read_gb_s":
        from hetero_cpu_kernels.bandwidth import dram_read_gb_s

        return dram_read_gb_s
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
