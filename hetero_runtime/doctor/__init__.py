"""What this machine gives the runtime: `examine()` measures, `report` prints.

    gpu     devices, their memory, Triton            isa      instruction sets that really execute
    link    pinned, pageable, zero-copy GB/s         cores    cores, SMT, NUMA, CPU quota
    dram    GB/s that the CPU reads                  limits   memory, memlock, huge pages, swap
    disk    direct reads of the model's folder       experts  what would compute them on the CPU
    jetson  board, power mode, clocks, zram

Each check is a file of its own, imported when it runs.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from pathlib import Path

from hetero_runtime.doctor.base import Check, Finding, Status
from hetero_runtime.doctor.guard import run_check

__all__ = ["CHECKS", "Check", "Finding", "Status", "examine"]


def _check_of(module: str) -> Check:
    """The check in a sibling module; importing it is part of running it."""

    def check(folder: Path) -> list[Finding]:
        found: Check = importlib.import_module(f"{__name__}.{module}").check
        return found(folder)

    return check


CHECKS: Mapping[str, Check] = {
    name: _check_of(name)
    for name in ("gpu", "jetson", "link", "dram", "disk", "isa", "cores", "experts", "limits")
}
"""Every check by name, in the order of the report."""


def examine(
    path: Path | None = None,
    *,
    checks: Mapping[str, Check] = CHECKS,
    on_start: Callable[[str], None] = lambda name: None,
) -> list[Finding]:
    """Run every check and collect the findings; takes about ten seconds.

    `path` is a model's folder (None: the current one), for the disk below it. `on_start` hears the name
    of each check before it runs. Never raises for what the machine lacks or breaks.
    """
    folder = path or Path.cwd()
    findings: list[Finding] = []
    for name, check in checks.items():
        on_start(name)
        findings.extend(run_check(name, check, folder))
    return findings
