"""Activations in memory, for the compiled job: packing and single values. `activations` has the layouts."""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"
# mypy: disable-error-code="call-arg, attr-defined, var-annotated"

from __future__ import annotations

import numpy as np
from numba import carray

from hetero_cpu_kernels.addresses import bits_of, float_of, pointer
from hetero_cpu_kernels.experts.activations import DIGIT_TILES, DIGITS, FLOAT32, PAIRS, TILES
from hetero_cpu_kernels.experts.inner_jit import inner_jit as _jit


@_jit
def is_in_tiles(layout):
    """Whether 16 tokens lie together: of bfloat16, or of digits."""
    return layout.unit in (TILES, DIGIT_TILES)


@_jit
def value_at(layout, row, position):
    """Address of a value; in front of digits they are float32. Tiles of digits are written by kernels
    alone."""
    if layout.unit in (FLOAT32, DIGITS):
        return layout.at + row * layout.row_bytes + 4 * position
    if layout.unit == PAIRS:
        return layout.at + row * layout.row_bytes + 2 * position
    group = layout.at + (row >> 4) * 16 * layout.row_bytes
    return group + (position >> 1) * 64 + (row & 15) * 4 + (position & 1) * 2


@_jit
def store_value(unit, address, value):
    """A float32, or rounded to the nearest bfloat16."""
    if unit in (FLOAT32, DIGITS):
        carray(pointer(address), 1, np.float32)[0] = value
        return
    bits = bits_of(np.float32(value))
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))  # ties to even
    carray(pointer(address), 1, np.uint16)[0] = np.uint16(rounded >> np.uint32(16))


@_jit
def pack(layout, source, columns, source_row, row, block):
    """One block of a row of `source` (float32, flat, `columns` a row) into `row`; zero behind the end."""
    order = carray(pointer(layout.order_at), layout.block, np.int64)
    start = block * layout.block
    for p in range(min(layout.block, layout.padded - start)):
        column = start + order[p]
        value = source[source_row * columns + column] if column < columns else np.float32(0.0)
        store_value(layout.unit, value_at(layout, row, start + p), value)


@_jit
def write_activations(layout, pair, begin, values):
    """Columns from `begin` on of the row that a pair reads. Blocks are a power of two wide."""
    place = carray(pointer(layout.place_at), layout.block, np.int64)
    row = carray(pointer(layout.rows_at), pair + 1, np.int64)[pair]
    mask = layout.block - 1
    for r in range(values.size):
        within = (begin + r) & mask
        position = begin + r - within + place[within]
        store_value(layout.unit, value_at(layout, row, position), values[r])


@_jit
def read_activation(layout, pair, column):
    """What the kernels multiply the weights of a column with."""
    place = carray(pointer(layout.place_at), layout.block, np.int64)
    row = carray(pointer(layout.rows_at), pair + 1, np.int64)[pair]
    within = column & (layout.block - 1)
    address = value_at(layout, row, column - within + place[within])
    if layout.unit == FLOAT32:
        return carray(pointer(address), 1, np.float32)[0]
    half = np.uint32(carray(pointer(address), 1, np.uint16)[0])
    return float_of(np.uint32(half << np.uint32(16)))
