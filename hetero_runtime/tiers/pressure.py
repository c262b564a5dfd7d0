"""How short of memory this process is: what is free, and how much of the time somebody waits for memory.

Sources: kernel docs accounting/psi.rst, admin-guide/cgroup-v2.rst (memory.pressure).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import psutil

from hetero_runtime.plan.cgroup import memory_pressure_files, read_limits

_SOME = re.compile(r"^some avg10=(\d+\.\d+)", re.MULTILINE)


class Pressure(NamedTuple):
    """`free_bytes`: what can still be taken without reclaiming from others, limits of containers included.
    `stalled`: share of the last ten seconds in which somebody waited for memory; 0 where no kernel tells."""

    free_bytes: int
    stalled: float


def read_pressure(root: Path = Path("/")) -> Pressure:
    """The pressure now. `root` holds proc and sys (for tests)."""
    limit = read_limits(root).memory_free_bytes
    free = psutil.virtual_memory().available
    found = (_stalled(file) for file in memory_pressure_files(root))
    stalled = next((share for share in found if share is not None), 0.0)
    return Pressure(free if limit is None else min(free, limit), stalled)


def _stalled(file: Path) -> float | None:
    """`some avg10` as a share; None where the kernel was built or started without it."""
    try:
        match = _SOME.search(file.read_text(encoding="ascii"))
    except OSError:
        return None
    return None if match is None else float(match[1]) / 100
