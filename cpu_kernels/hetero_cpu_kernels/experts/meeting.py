"""Workers meet between two phases of a job, and whoever is early asks for what it reads next.

A worker that has arrived leaves its share of memory idle until the last one is here. So it says first that it
is here, and then brings rows of its next phase, line after line, into its second-level cache: as long as
others are missing, and no more than leaves room there. It computes nothing, so no result depends on it.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"
# mypy: disable-error-code="call-arg, attr-defined"

from __future__ import annotations

import numpy as np
from numba import carray

from hetero_cpu_kernels.addresses import ask_for, pointer
from hetero_cpu_kernels.experts.inner_jit import inner_jit as _jit
from hetero_cpu_kernels.pool.doorbell import are_all_here, arrive, await_all

_LINE_BYTES = 64
_LINES_A_LOOK = 4
"""Asked for between two looks at who is here: memory gives them in less time than a meeting takes."""
_MOST_BYTES = 256 << 10
"""Of one meeting: a quarter of the smallest second-level cache of processors with AVX-512."""


@_jit
def place_of(matrix, record, row):
    """Where a row of a record lies, and bytes from it to the next; of packed ones those of the mantissas."""
    if matrix.is_packed:
        return record + matrix.first_element + row * matrix.cols, matrix.cols
    return record + matrix.offset + row * matrix.row_bytes, matrix.row_bytes


@_jit
def meet(plan, count, matrix, rows):
    """Wait until all workers are here. False when one of them failed before.

    `rows`: the expert, first row and end of what this worker reads next of `matrix`.
    """
    goal = arrive(plan.control, count)
    expert, first, end = rows
    if first < end:
        records = carray(pointer(plan.records_at), plan.num_experts, np.int64)
        place, row_bytes = place_of(matrix, records[expert], first)
        asked_end = place + min(_MOST_BYTES, (end - first) * row_bytes)
        while place < asked_end and not are_all_here(plan.control, goal):
            for _ in range(_LINES_A_LOOK):
                ask_for(place)
                place += _LINE_BYTES
    return await_all(plan.control, goal)
