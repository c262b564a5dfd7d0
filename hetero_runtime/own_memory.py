"""What of host memory this process itself has resident, and had at most."""

from __future__ import annotations

import re
import resource
import sys
from pathlib import Path

_STATUS = Path("/proc/self/status")
_RUSAGE_UNIT = 1 if sys.platform == "darwin" else 1024


def peak_rss_bytes(status: Path = _STATUS) -> int:
    """The most that was resident since this process began to run its program, in bytes.

    Linux counts that in VmHWM. Where `status` is missing or does not say it, it is getrusage's ru_maxrss,
    which on Linux is never less than what the parent had when it started this process.
    """
    peak = _find(status, "VmHWM")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _RUSAGE_UNIT if peak is None else peak


def status_bytes(field: str, status: Path = _STATUS) -> int:
    """`VmRSS`, `VmHWM` or the like of this process, in bytes.

    Raises OSError where the kernel does not report it.
    """
    found = _find(status, field)
    if found is None:
        raise OSError(f"{status} does not report {field}: this takes a Linux kernel with /proc")
    return found


def _find(status: Path, field: str) -> int | None:
    try:
        text = status.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    found = re.search(rf"^{field}:\s+(\d+) kB$", text, re.MULTILINE)
    return None if found is None else int(found[1]) * 1024
