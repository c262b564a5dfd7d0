"""What host and device tell each other while a graph runs, through mapped host memory.

`ControlRegion` is the memory, `PrefetchWorker` the host's side of it, `memory_order` the kernels' way to it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hetero_gpu.control.fault import TableError
from hetero_gpu.control.region import ControlRegion, Landed, Word

if TYPE_CHECKING:
    from hetero_gpu.control.worker import CopyEngine, PrefetchWorker

__all__ = ["ControlRegion", "CopyEngine", "Landed", "PrefetchWorker", "TableError", "Word"]


def __getattr__(name: str) -> object:
    """numba, which the worker needs, takes a while to import; tables without prefetch do without it."""
    if name in ("CopyEngine", "PrefetchWorker"):
        from hetero_gpu.control import worker

        return getattr(worker, name)
    raise AttributeError(name)
