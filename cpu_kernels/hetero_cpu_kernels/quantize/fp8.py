"""fp8, e4m3: one float32 scale for each 128 × 128 block, 1/448 of its largest magnitude.

A value is rounded to the nearest, ties to even: within 1/16 of itself, or 2^-10 of a scale where it is small.
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

BLOCK = 128
_LARGEST = np.float32(448)
_LEAST_NORMAL = np.float32(2.0**-6)
_LEAST_NORMAL_BITS = np.uint32(0x3C800000)
_SHIFTER = np.float32(2.0**14)
"""Added to a small magnitude it leaves multiples of 2^-9, e4m3's least step, in the last bits."""
_SHIFTER_BITS = np.uint32(0x46800000)


@compiled
def write(words: Any, shift: Any, values: Any, scales: Any) -> Any:
    """See `base.Kernel`."""
    rows, cols = words.shape
    bits = np.empty(cols, np.uint32)
    weights = bits.view(np.float32)
    rounded, shifted = np.empty(BLOCK, np.float32), np.empty(BLOCK, np.float32)
    errors = squares = 0.0
    for b in range(scales.shape[0]):
        begin, end = b * BLOCK, min(rows, (b + 1) * BLOCK)
        if not _write_scales(words, shift, begin, end, scales[b]):
            return 0.0, np.nan
        for r in range(begin, end):
            load_row(words, r, shift, bits)
            squares += sum_squares(weights)
            for c in range(scales.shape[1]):
                first, last = c * BLOCK, min(cols, (c + 1) * BLOCK)
                scale = scales[b, c] if scales[b, c] > LEAST_SCALE else np.float32(1)
                _write_block_row(weights[first:last], scale, values[r, first:last], rounded, shifted)
                errors += _error(weights[first:last], rounded, scale)
    return errors, squares


@compiled
def _write_scales(words: Any, shift: Any, begin: Any, end: Any, scales: Any) -> Any:
    """The scales of blocks beside each other; False when a weight is not finite."""
    cols = words.shape[1]
    largest = np.zeros(scales.size, np.uint32)
    for r in range(begin, end):
        for c in range(scales.size):
            most = largest[c]
            for j in range(c * BLOCK, min(cols, (c + 1) * BLOCK)):
                most = max(most, np.uint32(np.uint32(words[r, j]) << shift & 0x7FFFFFFF))
            largest[c] = most
    magnitudes = largest.view(np.float32)
    for c in range(scales.size):
        if largest[c] >= NOT_FINITE:
            return False
        scales[c] = magnitudes[c] / _LARGEST
    return True


@compiled
def _write_block_row(weights: Any, scale: Any, codes: Any, rounded: Any, shifted: Any) -> Any:
    """The codes of a row of a block. `rounded` is left with what they mean before scaling; `shifted` is
    overwritten."""
    for j in range(weights.size):
        rounded[j] = weights[j] / scale
        shifted[j] = abs(rounded[j]) + _SHIFTER
    bits, small = rounded.view(np.uint32), shifted.view(np.uint32)
    for j in range(weights.size):
        sign = np.uint32(bits[j] & 0x80000000)
        magnitude = np.uint32(bits[j] ^ sign)
        nearest = np.uint32(magnitude + 0x7FFFF + (magnitude >> 20 & 1))
        normal = min(np.uint32((nearest >> 20) - (120 << 3)), np.uint32(0x7E))
        subnormal = np.uint32(small[j] - _SHIFTER_BITS)
        code = subnormal if magnitude < _LEAST_NORMAL_BITS else normal
        codes[j] = np.uint8(code | sign >> 24)
        bits[j] = np.uint32(nearest & 0xFFF00000 | sign)
    for j in range(weights.size):
        value = shifted[j] - _SHIFTER
        value = value if rounded[j] >= 0 else -value
        rounded[j] = value if abs(rounded[j]) < _LEAST_NORMAL else rounded[j]


@compiled_sums
def _error(weights: Any, rounded: Any, scale: Any) -> Any:
    """Squared errors of a row of a block."""
    total = np.float32(0)
    for j in range(weights.size):
        error = rounded[j] * scale - weights[j]
        total += error * error
    return total
