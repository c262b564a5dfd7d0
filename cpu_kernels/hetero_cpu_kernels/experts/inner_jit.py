"""How functions are compiled that compiled code alone calls: without ways in for Python and C.

They are most of a job. What numba makes of each beside the function itself is a fifth of the compiling, and
as much of the memory.
"""

# mypy: disable-error-code="call-overload"

from __future__ import annotations

from numba import njit

inner_jit = njit(
    nogil=True, error_model="numpy", boundscheck=False, no_cpython_wrapper=True, no_cfunc_wrapper=True
)
