"""Persistent workers: threads that sleep in compiled code until a job rings, and cost nothing meanwhile.

    pool = WorkerPool.create()
    pool.submit(job.address, plan_address)    # returns at once
    pool.wait()                               # raises what went wrong

A job is a compiled function `int64 job(int64 plan, int64 index, int64 count)` that every worker runs with its
own index. It takes no Python lock, so workers run beside the interpreter, and beside torch's threads.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Self

import numpy as np

from hetero_cpu_kernels.pool import doorbell
from hetero_cpu_kernels.pool.placement import place_workers
from hetero_cpu_kernels.topology import read_topology

_SPINS = 10_000
"""Looks at the doorbell before a worker sleeps: 0.1 to 0.5 ms, about the pause between a step's layers."""
_CALLER_SPINS = 60_000
"""The same for a caller: 1 to 3 ms, longer than a layer of one token, because a sleeper is woken late (0.1 ms
on a virtual machine). One that shares a core with a worker gives way to it."""
_WAIT_NS = 100_000_000
"""A sleeping caller returns to Python so often, to see signals."""


class WorkerError(RuntimeError):
    """A worker reported a failure. The pool stays usable."""


class WorkerPool:
    """Workers bound to processors. Any thread may call; one job runs at a time."""

    def __init__(
        self, cpus: Sequence[int], *, spins: int = _SPINS, caller_spins: int = _CALLER_SPINS
    ) -> None:
        """Start a worker on each of `cpus`. Raises OSError for one that this process may not use."""
        if not cpus:
            raise ValueError("a pool needs at least one processor")
        self.cpus = tuple(cpus)
        self._spins, self._caller_spins = spins, caller_spins
        self._words = np.zeros(doorbell.CONTROL_BYTES + doorbell.LINE_BYTES, dtype=np.uint8)
        self.control = -(-self._words.ctypes.data // doorbell.LINE_BYTES) * doorbell.LINE_BYTES
        start = self.control - self._words.ctypes.data
        self._control_words = self._words[start : start + doorbell.CONTROL_BYTES].view(np.int64)
        self._timeout = np.array([0, _WAIT_NS], dtype=np.int64)
        self._timeout_at = self._timeout.ctypes.data
        self._busy = threading.Lock()
        self._failures: Mapping[int, str] = {}
        self._finished_ns = 0
        self._is_closed = False
        self._errors: list[BaseException] = []
        started = threading.Semaphore(0)
        self._threads = [
            threading.Thread(target=self._work, args=(i, started), name=f"expert-worker-{i}", daemon=True)
            for i in range(len(cpus))
        ]
        for thread in self._threads:
            thread.start()
        for _ in self._threads:
            started.acquire()
        if self._errors:
            self.close()
            raise self._errors[0]

    @classmethod
    def create(cls, num_threads: int | None = None) -> WorkerPool:
        """A pool placed on this machine's cores (`placement`)."""
        return cls(place_workers(read_topology(), num_threads))

    @property
    def num_workers(self) -> int:
        return len(self.cpus)

    @property
    def finished_ns(self) -> int:
        """When the job that was waited for last was finished, as `time.perf_counter_ns` counts."""
        return self._finished_ns

    def submit(self, job: int, plan: int, *, failures: Mapping[int, str] | None = None) -> None:
        """Start a job; waits while another caller's runs. What `plan` points to must live until `wait`.

        `job`: its address. `failures`: what each status other than 0 means. Raises RuntimeError when the pool
        is closed.
        """
        self._busy.acquire()
        if self._is_closed:
            self._busy.release()
            raise RuntimeError("the worker pool is closed")
        self._failures = failures or {}
        doorbell.ring(self.control, job, plan)

    def wait(self) -> None:
        """Return when the submitted job is finished by all workers. Raises WorkerError when one failed."""
        assert self._busy.locked(), "wait without a submitted job"
        try:
            while not self._is_done():
                pass
        finally:
            while not self._is_done():  # interrupted: what the plan points to must still outlive the job
                pass
            status, failures = self._take_outcome()
        if status:
            raise WorkerError(failures.get(status, f"a worker ended its job with status {status}"))

    def run(self, job: int, plan: int, *, failures: Mapping[int, str] | None = None) -> None:
        """`submit` and `wait`."""
        self.submit(job, plan, failures=failures)
        self.wait()

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Inside, compiled code of the caller rings and waits for itself (`doorbell`); all others wait.

        Raises RuntimeError when the pool is closed.
        """
        with self._busy:
            if self._is_closed:
                raise RuntimeError("the worker pool is closed")
            yield

    def close(self) -> None:
        """End the workers, after the running job. A second call does nothing."""
        with self._busy:
            if self._is_closed:
                return
            self._is_closed = True
            self._control_words[doorbell.STOPPED // 8] = 1
            doorbell.ring(self.control, 0, 0)
        for thread in self._threads:
            thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _take_outcome(self) -> tuple[int, Mapping[int, str]]:
        """The finished job's status and what it may mean; the next job may start."""
        words = self._control_words
        outcome = int(words[doorbell.FAILED // 8]), self._failures
        self._finished_ns = int(words[doorbell.FINISHED // 8])
        self._busy.release()
        return outcome

    def _is_done(self) -> bool:
        return bool(doorbell.await_done(self.control, self.num_workers, self._caller_spins, self._timeout_at))

    def _work(self, index: int, started: threading.Semaphore) -> None:
        try:
            if hasattr(os, "sched_setaffinity"):
                os.sched_setaffinity(0, {self.cpus[index]})  # of this thread only
        except OSError as error:
            self._errors.append(error)
        finally:
            started.release()
        doorbell.serve(self.control, index, self.num_workers, self._spins)
