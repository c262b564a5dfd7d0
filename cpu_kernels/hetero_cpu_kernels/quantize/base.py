"""The contract of a quantiser, and what they share: rows as float32 and the size of an error."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, Literal, NamedTuple

import numba
import numpy as np
import numpy.typing as npt

Encoding = Literal["int8", "int4", "fp8"]
Kernel = Callable[[Any, Any, Any, Any], tuple[float, float]]
"""(weights as unsigned words, bits to shift them left, values, scales) to (squared errors, squared weights),
summed; weights that are not finite make the second sum NaN."""

LEAST_SCALE = np.float32(1e-30)
"""Weights that would need a smaller one are written as zeros: its inverse may be infinite."""
NOT_FINITE = np.uint32(0x7F800000)
"""Magnitudes from this on, taken as integers, are infinite or no number."""


class QuantizedError(NamedTuple):
    """How far quantised weights are from the weights: sums over all elements."""

    squared_error: float
    squared_weight: float


def quantize(
    weights: npt.NDArray[Any], encoding: Encoding, *, values: npt.NDArray[np.uint8], scales: npt.NDArray[Any]
) -> QuantizedError:
    """Write `weights` to `values` and `scales`.

    `weights`: `[rows, cols]`, row after row, float32, or uint16 that are the bits of bfloat16. `values`:
    `[rows, bytes of a row]`. `scales`: float32 (int8 `[rows]`, fp8 `[ceil(rows / 128), ceil(cols / 128)]`) or
    the bits of bfloat16 as uint16 (int4 `[rows, ceil(cols / 32)]`). Raises ValueError when a weight is
    infinite or NaN; what was written is then of no use.
    """
    assert weights.flags.c_contiguous and values.flags.c_contiguous, "rows lie one after another"
    kernel: Kernel = import_module(f"hetero_cpu_kernels.quantize.{encoding}").write
    shift = np.uint32(16 if weights.dtype == np.uint16 else 0)
    words = weights if weights.dtype == np.uint16 else weights.view(np.uint32)
    error = QuantizedError(*kernel(words, shift, values, scales))
    if not np.isfinite(error.squared_weight):
        raise ValueError("a weight is infinite or not a number")
    return error


def compiled(function: Any) -> Any:
    """Compiled without the GIL; floats are added in the order in which they are written."""
    return numba.njit(nogil=True, boundscheck=False, error_model="numpy")(function)


def compiled_sums(function: Any) -> Any:
    """As `compiled`, but sums may be added in any order, as vectors do it."""
    flags = {"reassoc", "nsz", "contract"}
    return numba.njit(nogil=True, boundscheck=False, error_model="numpy", fastmath=flags)(function)


@compiled
def load_row(words: Any, row: Any, shift: Any, bits: Any) -> Any:
    """One row as the bits of float32. Returns its largest magnitude, as an integer."""
    largest = np.uint32(0)
    for j in range(bits.size):
        word = np.uint32(np.uint32(words[row, j]) << shift)
        bits[j] = word
        largest = max(largest, np.uint32(word & 0x7FFFFFFF))
    return largest


@compiled_sums
def sum_squares(row: Any) -> Any:
    """Sum of the squares of a row of float32."""
    total = np.float32(0)
    for j in range(row.size):
        total += row[j] * row[j]
    return total
