"""Threads for expert kernels: `WorkerPool.create()`; placement on cores and nodes, doorbell, barrier."""

from __future__ import annotations

from hetero_cpu_kernels.pool.placement import place_workers
from hetero_cpu_kernels.pool.workers import WorkerError, WorkerPool

__all__ = ["WorkerError", "WorkerPool", "place_workers"]
