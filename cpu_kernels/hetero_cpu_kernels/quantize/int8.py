"""int8: one float32 scale a row, 1/127 of its largest magnitude. No weight is off by more than half of it."""

from __future__ import annotations

from typing import Any

import numpy as np

from hetero_cpu_kernels.quantize.base import (
    LEAST_SCALE,
    NOT_FINITE,
    compiled,
    compiled_sums,
    load_row,
    sum_squares,
)


@compiled
def write(words: Any, shift: Any, values: Any, scales: Any) -> Any:
    """See `base.Kernel`."""
    rows, cols = words.shape
    bits = np.empty(cols, np.uint32)
    weights = bits.view(np.float32)
    errors = squares = 0.0
    for r in range(rows):
        largest = np.empty(1, np.uint32)
        largest[0] = load_row(words, r, shift, bits)
        if largest[0] >= NOT_FINITE:
            return 0.0, np.nan
        scale = largest.view(np.float32)[0] / np.float32(127)
        scales[r] = scale
        squares += sum_squares(weights)
        errors += _write_row(weights, scale, values[r])
    return errors, squares


@compiled_sums
def _write_row(weights: Any, scale: Any, codes: Any) -> Any:
    """The codes of one row; returns its squared errors."""
    inverse = np.float32(1) / scale if scale > LEAST_SCALE else np.float32(0)
    total = np.float32(0)
    for j in range(weights.size):
        code = np.int32(np.int32(weights[j] * inverse + np.float32(128.5)) - 128)
        codes[j] = np.uint8(code & 0xFF)
        error = np.float32(code) * scale - weights[j]
        total += error * error
    return total
