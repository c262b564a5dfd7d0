"""Threads for expert kernels: `WorkerPool.create()`; placement on cores and nodes, doorbell, barrier.

Importing this face compiles nothing; the first use of a pool's name does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hetero_cpu_kernels.pool.placement import place_workers

if TYPE_CHECKING:
    from hetero_cpu_kernels.pool.workers import WorkerError, WorkerPool

__all__ = ["WorkerError", "WorkerPool", "place_workers"]


def __getattr__(name: str) -> Any:
    if name in ("WorkerError", "WorkerPool"):
        from hetero_cpu_kernels.pool import workers

        return getattr(workers, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
