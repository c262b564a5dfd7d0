"""Let a kernel start while the one before it still ends.

    ordinary      A ─────────┤ gap, start │ B: read weights, read inputs, compute
    overlapping   A ─────────┤
                       start │ B: read weights ┊ meet ┊ read inputs, compute

A decode step is a chain of short kernels, and between two of them the device falls idle: the last programs of
one end, the first of the next start and wait for memory. On compute capability 9.0 and newer a kernel may be
launched early (programmatic dependent launch, CUDA C++ programming guide). Elsewhere launches are ordinary
and `meet` is nothing.

The rule for a kernel that is launched with `overlap_options`: every program calls `meet` before it writes
anything and before it reads what the kernel just before it wrote. Before that it may read what is older:
kernels let their successor start only in `meet`, so when a program runs, all kernels but the last are done.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"
# ruff: noqa: N803 (compile-time constants are written in capitals)

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

_FIRST_MAJOR = 9


def overlap_options(device: torch.device) -> dict[str, bool]:
    """Launch options of a kernel that keeps the rule, and takes `OVERLAPS`."""
    return {"OVERLAPS": True, "launch_pdl": True} if _can_overlap(device) else {"OVERLAPS": False}


@functools.cache
def _can_overlap(device: torch.device) -> bool:
    return (
        device.type == "cuda"
        and torch.version.hip is None
        and torch.cuda.get_device_capability(device)[0] >= _FIRST_MAJOR
    )


@triton.jit
def meet(OVERLAPS: tl.constexpr):
    """Wait until the kernel before has ended and its writes are seen, then let the next one start. May be
    called again."""
    if OVERLAPS:
        gdc_wait()
        gdc_launch_dependents()
