"""Which processor each worker is bound to.

One thread a physical core, one core left to the engine's own thread, and the nodes loaded evenly: every node
has memory channels of its own, so workers on one node alone would leave half of them idle.
"""

from __future__ import annotations

from hetero_cpu_kernels.topology import Topology


def place_workers(topology: Topology, num_threads: int | None = None) -> tuple[int, ...]:
    """A processor for each worker, those of one node side by side.

    `num_threads` None: one a core that the container's quota grants, less one for the engine, at least one.
    The engine's core is the first of the first node: it is used last. Raises ValueError for more threads
    than physical cores.
    """
    if num_threads is None:
        num_threads = max(1, topology.worker_threads - 1)
    if not 1 <= num_threads <= len(topology.cores):
        raise ValueError(f"{num_threads} threads on {len(topology.cores)} cores: give 1 to that many")
    left = {node.number: list(reversed(topology.core_heads(node))) for node in topology.nodes}
    chosen: dict[int, list[int]] = {number: [] for number in left}
    for _ in range(num_threads):
        # The node with the fewest workers so far; of equal ones that with most cores, then the last.
        open_nodes = [number for number, cores in left.items() if cores]
        node = min(open_nodes, key=lambda number: (len(chosen[number]), -len(left[number]), -number))
        chosen[node].append(left[node].pop(0))
    return tuple(cpu for number in sorted(chosen) for cpu in sorted(chosen[number]))
