"""kt-kernel's threads, bound by us.

Beside its workers runs a thread that takes calls off a queue and spins until a call is done: on a worker's
processor it makes that worker, and so every call, two to ten times slower. kt-kernel binds its workers to the
first cores of the machine, not always all of them, and that thread to none.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence, Set
from contextlib import suppress
from pathlib import Path
from typing import Any

from hetero_cpu_kernels.ktransformers.library import load, quiet

_THREADS = Path("/proc/self/task")
_WORKER_NAME = "numa_"
_NAMED_S = 5.0
"""A thread names itself at once when it runs."""


class KtPool:
    """A worker on each of `cpus`; what else kt-kernel starts goes to `spare_cpus`. One call at a time.

    Raises ImportError without kt-kernel, ValueError where no processor is spare, RuntimeError where kt-kernel
    did not start its workers.
    """

    def __init__(self, cpus: Sequence[int]) -> None:
        extension = load()
        self.num_workers, self.spare_cpus = len(cpus), spare_cpus(cpus)
        before = set(_thread_names())
        config = extension.WorkerPoolConfig()
        config.subpool_count, config.subpool_numa_map = 1, [0]
        config.subpool_thread_count = [len(cpus)]
        with quiet():
            self._queue = extension.CPUInfer(config)
        self.worker_ids, self.helper_ids = _started(before, len(cpus))
        for thread, cpu in zip(self.worker_ids, cpus, strict=True):
            os.sched_setaffinity(thread, {cpu})
        for thread in self.helper_ids:
            os.sched_setaffinity(thread, self.spare_cpus)

    @property
    def backend(self) -> Any:
        """What a layer is made for."""
        return self._queue.backend_

    def submit(self, task: Any) -> None:
        """Start a task of a layer. One at a time: `wait` first."""
        self._queue.submit(task)

    def wait(self) -> None:
        """Return when the task is done. Raises what went wrong in it."""
        self._queue.sync()

    def close(self) -> None:
        """End the threads. No task is running, and no layer is used any more."""
        with quiet():
            self._queue = None


def spare_cpus(cpus: Sequence[int]) -> set[int]:
    """The processors beside those of workers. Raises ValueError where there is none."""
    spare = os.sched_getaffinity(0) - set(cpus)
    if not spare:
        raise ValueError(
            f"kt-kernel has a thread that spins beside its workers: {len(cpus)} of them leave no processor "
            "of this process to it"
        )
    return spare


def _started(before: Set[int], num_workers: int) -> tuple[list[int], list[int]]:
    """Threads that were not there before: workers, and others."""
    deadline = time.monotonic() + _NAMED_S
    while True:
        new = {thread: name for thread, name in _thread_names().items() if thread not in before}
        workers = sorted(thread for thread, name in new.items() if name.startswith(_WORKER_NAME))
        if len(workers) == num_workers:
            return workers, sorted(new.keys() - workers)
        if time.monotonic() > deadline:
            raise RuntimeError(f"kt-kernel started {len(workers)} workers, not {num_workers}: {new}")
        time.sleep(0.001)


def _thread_names() -> dict[int, str]:
    names: dict[int, str] = {}
    for path in _THREADS.iterdir():
        with suppress(FileNotFoundError):  # it ended meanwhile
            names[int(path.name)] = (path / "comm").read_text()
    return names
