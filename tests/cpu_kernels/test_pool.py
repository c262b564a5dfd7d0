"""Workers: every one runs every job, failures surface at the next wait, idling is free, closing is clean."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from numba import carray, cfunc

from hetero_cpu_kernels.addresses import pointer
from hetero_cpu_kernels.pool import WorkerError, WorkerPool, place_workers
from hetero_cpu_kernels.pool.doorbell import arrive, await_all
from hetero_cpu_kernels.topology import Node, Topology

SIGNATURE = "int64(int64, int64, int64)"
COUNTS = (1, 2, 3)


@cfunc(SIGNATURE)
def add_one(plan: Any, index: Any, count: Any) -> Any:
    """plan: int64 [workers]"""
    carray(pointer(plan), count, np.int64)[index] += 1
    return 0


@cfunc(SIGNATURE)
def fail_at_second(plan: Any, index: Any, count: Any) -> Any:
    """The last worker fails; the others meet a barrier that it never reaches. plan: the control's address."""
    if index == count - 1:
        return 7
    return 0 if await_all(plan, arrive(plan, count)) else 8


@cfunc(SIGNATURE)
def exchange(plan: Any, index: Any, count: Any) -> Any:
    """Each round writes what the neighbour wrote in the round before. plan: int64 [1 + 2 * workers]"""
    words = carray(pointer(plan), 1 + 2 * count, np.int64)
    for number in range(100):
        here, there = number % 2, (number + 1) % 2
        words[1 + there * count + index] = words[1 + here * count + (index + 1) % count] + 1
        if not await_all(words[0], arrive(words[0], count)):
            return 1
    return 0


@pytest.fixture(params=COUNTS, ids=lambda count: f"{count}-workers")
def pool(request: pytest.FixtureRequest) -> Iterator[WorkerPool]:
    """More workers than cores too: several on one processor."""
    cpus = sorted(os.sched_getaffinity(0))
    with WorkerPool([cpus[i % len(cpus)] for i in range(request.param)], spins=50) as workers:
        yield workers


def test_every_worker_runs_every_job(pool: WorkerPool) -> None:
    done = np.zeros(pool.num_workers, np.int64)
    for _ in range(50):
        pool.run(add_one.address, done.ctypes.data)
    assert done.tolist() == [50] * pool.num_workers


def test_sleeping_workers_wake(pool: WorkerPool) -> None:
    done = np.zeros(pool.num_workers, np.int64)
    for _ in range(3):
        time.sleep(0.02)
        pool.run(add_one.address, done.ctypes.data)
    assert done.tolist() == [3] * pool.num_workers


def test_workers_meet_inside_a_job(pool: WorkerPool) -> None:
    words = np.zeros(1 + 2 * pool.num_workers, np.int64)
    words[0] = pool.control
    pool.run(exchange.address, words.ctypes.data)
    assert words[1 : 1 + pool.num_workers].tolist() == [100] * pool.num_workers


def test_a_failure_is_raised_at_the_wait_and_the_pool_goes_on(pool: WorkerPool) -> None:
    pool.submit(fail_at_second.address, pool.control, failures={7: "no such expert"})
    with pytest.raises(WorkerError, match="no such expert"):
        pool.wait()
    with pytest.raises(WorkerError, match="status 7"):
        pool.run(fail_at_second.address, pool.control)
    done = np.zeros(pool.num_workers, np.int64)
    pool.run(add_one.address, done.ctypes.data)
    assert done.all()


def test_many_python_threads_take_turns(pool: WorkerPool) -> None:
    done = np.zeros(pool.num_workers, np.int64)

    def call() -> None:
        for _ in range(20):
            pool.run(add_one.address, done.ctypes.data)

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert done.tolist() == [80] * pool.num_workers


def test_idle_workers_use_no_processor_time(pool: WorkerPool) -> None:
    done = np.zeros(pool.num_workers, np.int64)
    pool.run(add_one.address, done.ctypes.data)
    time.sleep(0.05)  # the workers stop spinning
    before = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - before < 0.01


def test_closing_ends_the_threads_and_may_be_repeated(pool: WorkerPool) -> None:
    pool.close()
    pool.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("expert-worker")]
    with pytest.raises(RuntimeError, match="closed"):
        pool.run(add_one.address, 0)


def test_workers_are_bound_and_the_caller_is_not() -> None:
    before = os.sched_getaffinity(0)
    with WorkerPool([min(before)]):
        assert os.sched_getaffinity(0) == before


def test_a_processor_that_is_not_there_is_an_error() -> None:
    with pytest.raises(OSError, match="Invalid argument"):
        WorkerPool([100_000])


def machine(*nodes: tuple[int, ...]) -> Topology:
    """Nodes of cores without siblings."""
    return Topology(
        cores=tuple((cpu,) for node in nodes for cpu in node),
        nodes=tuple(Node(number, cpus) for number, cpus in enumerate(nodes)),
        quota=None,
        online=sum(map(len, nodes)),
        cache_bytes=0,
    )


@pytest.mark.parametrize(
    ("topology", "num_threads", "expected"),
    [
        (machine((0,)), None, (0,)),
        (machine((0, 1)), None, (1,)),
        (machine((0, 1, 2, 3)), None, (1, 2, 3)),
        (machine((0, 1), (2, 3)), None, (1, 2, 3)),
        (machine((0, 1), (2, 3)), 2, (1, 3)),
        (machine((0, 1), (2, 3)), 4, (0, 1, 2, 3)),
    ],
)
def test_placement(topology: Topology, num_threads: int | None, expected: tuple[int, ...]) -> None:
    assert place_workers(topology, num_threads) == expected


def test_placement_counts_a_core_once_and_refuses_more_threads_than_cores() -> None:
    siblings = Topology(((0, 2), (1, 3)), (Node(0, (0, 1, 2, 3)),), None, 4, 0)
    assert place_workers(siblings, 2) == (0, 1)
    with pytest.raises(ValueError, match="3 threads on 2 cores"):
        place_workers(siblings, 3)
