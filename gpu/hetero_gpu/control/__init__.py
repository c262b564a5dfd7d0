"""What host and device tell each other while a graph runs, through mapped host memory.

`ControlRegion` is the memory, `PrefetchWorker` the host's side of it, `memory_order` the kernels' way to it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hetero_gpu.control.copy_engine import CopyEngine
from hetero_gpu.control.fault import TableError
from hetero_gpu.control.region import ControlRegion, Landed, Word

if TYPE_CHECKING:
    from hetero_gpu.control.worker import PrefetchWorker

__all__ = ["ControlRegion", "CopyEngine", "Landed", "PrefetchWorker", "TableError", "Word"]


def __getattr__(name: str) -> object:
    """numba, which the worker needs, takes a while to import; tables without prefetch do without it."""
    if name == "PrefetchWorker":
        from hetero_gpu.control.worker import PrefetchWorker

        return PrefetchWorker
    raise AttributeError(name)
