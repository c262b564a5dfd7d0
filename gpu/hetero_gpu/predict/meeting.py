"""Where programs of one launch wait for each other.

A phase asks for all that it reads and that the phase before did not write, then meets, then reads the rest:
loads are under way while programs wait.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"
# ruff: noqa: N803 (compile-time constants are written in capitals)

from __future__ import annotations

import triton
import triton.language as tl

from hetero_gpu.control.fault import TableError
from hetero_gpu.control.memory_order import store_release

_STALLED_ERROR = tl.constexpr(int(TableError.FORECAST_STALLED))
_MOST_LOOKS = tl.constexpr(1 << 17)
"""Some 0.1 s; a meeting takes about a microsecond."""


@triton.jit
def meet_all(is_due, arrivals, error_address, NUM_PROGRAMS: tl.constexpr):
    """Where a meeting is due, nobody goes on before all programs are here, and then all see what each wrote.

    Tickets are never taken back: a meeting is full at the next multiple of the number of programs. The wait
    is bounded: a forecast is advice, and a wrong one is better than a device that hangs.
    """
    if is_due:
        tl.debug_barrier()  # all threads have written before one of them says so
        ticket = tl.atomic_add(arrivals, 1, sem="acq_rel")
        full = (ticket // NUM_PROGRAMS + 1) * NUM_PROGRAMS
        here, looks = ticket + 1, 0
        while (here < full) & (looks < _MOST_LOOKS):
            here = tl.atomic_add(arrivals, 0, sem="acquire")
            looks += 1
        if here < full:
            store_release(error_address, _STALLED_ERROR)
        tl.debug_barrier()  # and none reads before the one that looked has seen them
