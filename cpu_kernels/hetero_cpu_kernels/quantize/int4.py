"""int4: one bfloat16 scale for each 32 columns of a row.

Two scales are tried and the one with the smaller error is taken: 1/7 of the largest magnitude, which clips
nothing, and the one that makes the largest weight -8, which is finer and clips weights near its opposite.
"""

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

GROUP = 32


@compiled
def write(words: Any, shift: Any, values: Any, scales: Any) -> Any:
    """See `base.Kernel`."""
    rows, cols = words.shape
    num_groups = scales.shape[1]
    bits = np.zeros(num_groups * GROUP, np.uint32)  # a short last group is filled up with zeros
    weights = bits.view(np.float32)
    codes = np.empty(bits.size, np.uint8)
    tried = np.empty((2, num_groups), np.float32)
    errors = squares = 0.0
    for r in range(rows):
        if load_row(words, r, shift, bits[:cols]) >= NOT_FINITE:
            return 0.0, np.nan
        squares += sum_squares(weights)
        _find_scales(bits, tried)
        errors += _write_row(weights, tried, codes)
        chosen = tried[0].view(np.uint32)
        for g in range(num_groups):
            scales[r, g] = np.uint16(chosen[g] >> 16)
        for i in range(cols // 2):
            values[r, i] = codes[2 * i] | codes[2 * i + 1] << np.uint8(4)
    return errors, squares


@compiled
def _find_scales(bits: Any, tried: Any) -> Any:
    """The two scales of each group of a row, as bfloat16 has them: to the nearest, ties to even."""
    num_groups = tried.shape[1]
    extreme = np.empty(num_groups, np.uint32)
    for g in range(num_groups):
        largest = np.uint32(0)
        for j in range(GROUP):
            word = bits[g * GROUP + j]
            largest = max(largest, np.uint32(word << 1 | word >> 31))  # the sign comes last
        extreme[g] = np.uint32(largest >> 1 | largest << 31)
    weights = extreme.view(np.float32)
    for g in range(num_groups):
        tried[0, g] = weights[g] / np.float32(-8)
        tried[1, g] = abs(weights[g]) / np.float32(7)
    rounded = tried.view(np.uint32)
    for k in range(2):
        for g in range(num_groups):
            word = rounded[k, g]
            rounded[k, g] = np.uint32(word + 0x7FFF + (word >> 16 & 1)) & np.uint32(0xFFFF0000)


@compiled_sums
def _write_row(weights: Any, tried: Any, codes: Any) -> Any:
    """The codes of a row, one a byte. `tried[0]` is left with the scales that were taken; returns the squared
    errors."""
    errors = np.float32(0)
    for g in range(tried.shape[1]):
        finer, safe = tried[0, g], tried[1, g]
        by_finer = np.float32(1) / finer if abs(finer) > LEAST_SCALE else np.float32(0)
        by_safe = np.float32(1) / safe if safe > LEAST_SCALE else np.float32(0)
        finer_error = safe_error = np.float32(0)
        for j in range(GROUP):
            weight = weights[g * GROUP + j]
            code = min(np.int32(weight * by_finer + np.float32(8.5)), np.int32(15))
            error = (np.float32(code) - np.float32(8)) * finer - weight
            finer_error += error * error
            code = np.int32(weight * by_safe + np.float32(8.5))
            error = (np.float32(code) - np.float32(8)) * safe - weight
            safe_error += error * error
        if finer_error > safe_error:
            tried[0, g], by_finer, finer_error = safe, by_safe, safe_error
        errors += finer_error
        for j in range(GROUP):
            code = np.int32(weights[g * GROUP + j] * by_finer + np.float32(8.5))
            codes[g * GROUP + j] = np.uint8(min(code, np.int32(15)))
    return errors
