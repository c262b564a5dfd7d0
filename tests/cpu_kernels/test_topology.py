"""Topology from made-up /sys trees: SMT, two sockets, a container, a kernel that says nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from hetero_cpu_kernels.topology import Node, parse_cpu_list, read_topology


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text + "\n")


@pytest.fixture
def two_sockets(tmp_path: Path) -> Path:
    """Two nodes of two cores with two threads each: cpu n and n + 4 share core n; 32 MiB cache a node."""
    system = tmp_path / "sys/devices/system"
    write(system / "cpu/online", "0-7")
    for cpu in range(8):
        core, node = cpu % 4, cpu % 4 // 2
        folder = system / f"cpu/cpu{cpu}"
        write(folder / "topology/thread_siblings_list", f"{core},{core + 4}")
        for index, level, size, shared in [(0, 1, "32K", f"{core}"), (3, 3, "32M", f"node{node}")]:
            write(folder / f"cache/index{index}/level", str(level))
            write(folder / f"cache/index{index}/size", size)
            write(folder / f"cache/index{index}/shared_cpu_list", shared)
    write(system / "node/node0/cpulist", "0-1,4-5")
    write(system / "node/node1/cpulist", "2-3,6-7")
    return tmp_path


def test_smt_siblings_make_one_core(two_sockets: Path) -> None:
    topology = read_topology(root=two_sockets, allowed=range(8))
    assert topology.cores == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert topology.nodes == (Node(0, (0, 1, 4, 5)), Node(1, (2, 3, 6, 7)))
    assert topology.worker_threads == 4
    assert topology.core_heads(topology.nodes[1]) == (2, 3)
    assert topology.cache_bytes == 64 << 20


def test_affinity_hides_cores_and_nodes(two_sockets: Path) -> None:
    topology = read_topology(root=two_sockets, allowed=[4, 5])
    assert topology.cores == ((4,), (5,))
    assert topology.nodes == (Node(0, (4, 5)),)
    assert (topology.cpus, topology.online) == ((4, 5), 8)
    assert topology.cache_bytes == 32 << 20


@pytest.mark.parametrize(("quota", "threads"), [(None, 4), (0.5, 1), (2.9, 2), (64.0, 4)])
def test_a_quota_bounds_the_threads(two_sockets: Path, quota: float | None, threads: int) -> None:
    assert read_topology(root=two_sockets, allowed=range(8), quota=quota).worker_threads == threads


def test_a_silent_kernel_gives_one_core_a_processor(tmp_path: Path) -> None:
    topology = read_topology(root=tmp_path, allowed=[0, 1, 2])
    assert topology.cores == ((0,), (1,), (2,))
    assert topology.nodes == (Node(0, (0, 1, 2)),)
    assert (topology.online, topology.cache_bytes) == (3, 0)


def test_this_machine_has_a_core() -> None:
    topology = read_topology()
    assert 1 <= topology.worker_threads <= len(topology.cpus)


@pytest.mark.parametrize(
    ("text", "cpus"), [("0-3,8\n", (0, 1, 2, 3, 8)), ("5", (5,)), ("\n", ())], ids=["ranges", "one", "empty"]
)
def test_kernel_lists(text: str, cpus: tuple[int, ...]) -> None:
    assert parse_cpu_list(text) == cpus
