"""Permission to use AMX tile registers.

Tiles make every saved thread state 8 KiB larger, so Linux gives them only to a process that asks.
"""

from __future__ import annotations

import ctypes
import os

_ARCH_PRCTL = 158  # x86-64 system call; ARCH_REQ_XCOMP_PERM and the tile data feature, Linux 5.16
_REQUEST_PERMISSION = 0x1023
_TILE_DATA = 18


def request_amx() -> str:
    """Ask the kernel for AMX tile registers, for this process; empty when granted, else the reason.

    Every process that executes AMX must ask once. Call it on x86-64 only.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) == 0:
        return ""
    reason = os.strerror(ctypes.get_errno())
    return f"the kernel does not grant tile registers ({reason})"
