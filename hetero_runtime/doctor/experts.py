"""What would compute experts on the CPU: workers, where they sit, and the instruction set."""

from __future__ import annotations

from pathlib import Path

from hetero_cpu_kernels.experts import Target, targets_here
from hetero_cpu_kernels.pool import place_workers
from hetero_cpu_kernels.topology import Topology
from hetero_runtime.doctor.base import Finding
from hetero_runtime.doctor.cores import this_machine


def check(folder: Path) -> list[Finding]:
    """What `misses.handler: cpu` and `hybrid` would use here, with nothing else configured."""
    return judge(targets_here(), this_machine())


def judge(targets: tuple[Target, ...], topology: Topology) -> list[Finding]:
    """`targets`: those that execute here, in rising order of speed."""
    if not targets:
        meaning = "no instruction set of the kernels executes here; cpu.backend: torch computes without them"
        return [Finding("CPU experts", None, "", "absent", meaning)]
    cpus = place_workers(topology)
    where = "worker on processor" if len(cpus) == 1 else "workers on processors"
    exact = [target.name for target in targets if target.keeps_float32][-1]
    meaning = f"misses.handler: cpu or hybrid starts {len(cpus)} {where} {', '.join(map(str, cpus))}"
    if len(topology.cores) > len(cpus):
        meaning += "; one core is left for the engine"
    if exact != targets[-1].name:
        meaning += f"; models that are not in bfloat16 compute with {exact}"
    return [Finding("CPU experts", targets[-1].name, "", "ok", meaning)]
