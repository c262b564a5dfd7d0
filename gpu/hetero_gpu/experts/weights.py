"""Weights from a record to float32 in registers: what both kernels, decode and prefill, load through.

A loader takes the record's first byte and the wanted rows and columns, all of which broadcast to one tile;
what `mask` excludes comes back as zero and is not read. The bit patterns are exact: each gives the value that
`reference.py` looks up in a table.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"
# ruff: noqa: N803, N806, RET505, SIM108 (upper case marks what the compiler knows; a branch on it needs its else)

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import target_info


@triton.jit
def load_floats(record, index, mask, ARRAY: tl.constexpr):
    """Elements `index` of an array of floats: a matrix, scales or a bias of `layout`."""
    start = record + ARRAY.offset
    if ARRAY.encoding == "float32":
        start = start.to(tl.pointer_type(tl.float32))
    elif ARRAY.encoding == "float16":
        start = start.to(tl.pointer_type(tl.float16))
    else:
        tl.static_assert(ARRAY.encoding == "bfloat16")
        start = start.to(tl.pointer_type(tl.bfloat16))
    return tl.load(start + index, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def load_values(record, rows, cols, mask, MATRIX: tl.constexpr):
    """Values of a matrix that is not packed, before scaling."""
    if MATRIX.is_transposed:
        index = cols * MATRIX.rows + rows
    else:
        index = rows * MATRIX.cols + cols
    if MATRIX.encoding == "fp8":
        return decode_fp8(tl.load(record + MATRIX.offset + index, mask=mask, other=0))
    elif MATRIX.encoding == "int8":
        start = (record + MATRIX.offset).to(tl.pointer_type(tl.int8))
        return tl.load(start + index, mask=mask, other=0).to(tl.float32)
    else:
        return load_floats(record, index, mask, MATRIX)


@triton.jit
def load_packed(record, rows, halves, mask, MATRIX: tl.constexpr):
    """Values of a packed matrix, before scaling: of columns `2 * halves`, and of `2 * halves + 1`."""
    index = rows * (MATRIX.cols // 2) + halves
    codes = tl.load(record + MATRIX.offset + index, mask=mask, other=0)
    if MATRIX.encoding == "int4":
        return (codes & 0xF).to(tl.float32) - 8.0, (codes >> 4).to(tl.float32) - 8.0
    else:
        tl.static_assert(MATRIX.encoding == "fp4")
        return decode_fp4(codes & 0xF), decode_fp4(codes >> 4)


@triton.jit
def load_scales(record, rows, cols, mask, MATRIX: tl.constexpr):
    """The factors of the blocks that hold these elements."""
    SCALES: tl.constexpr = MATRIX.scales
    PART_ROWS: tl.constexpr = MATRIX.rows // SCALES.parts
    ROW_BLOCKS: tl.constexpr = MATRIX.scale_shape[1]
    COL_BLOCKS: tl.constexpr = MATRIX.scale_shape[2]
    block_row = (rows // PART_ROWS) * ROW_BLOCKS + (rows % PART_ROWS) // SCALES.block_rows
    index = block_row * COL_BLOCKS + cols // SCALES.block_cols
    if SCALES.encoding == "e8m0":
        return decode_e8m0(tl.load(record + SCALES.offset + index, mask=mask, other=0))
    else:
        return load_floats(record, index, mask, SCALES)


@triton.jit
def load_tile(record, rows, is_row, start, MATRIX: tl.constexpr, TILE: tl.constexpr):
    """Weights `[rows, TILE.cols]` from column `start`, scaled."""
    LANES: tl.constexpr = TILE.cols // TILE.lane
    cols = start + tl.arange(0, TILE.cols)
    lanes = start + tl.arange(0, LANES) * TILE.lane
    row, is_row = rows[:, None], is_row[:, None]
    if MATRIX.is_packed:
        halves = start // 2 + tl.arange(0, TILE.cols // 2)
        mask = is_row & (halves < MATRIX.cols // 2)[None, :]
        low, high = load_packed(record, row, halves[None, :], mask, MATRIX)
    else:
        mask = is_row & (cols < MATRIX.cols)[None, :]
        values = load_values(record, row, cols[None, :], mask, MATRIX)
    if MATRIX.scales is not None:
        mask = is_row & (lanes < MATRIX.cols)[None, :]
        scales = load_scales(record, row, lanes[None, :], mask, MATRIX)
        if MATRIX.is_packed:
            values = tl.interleave(_scaled(low, scales), _scaled(high, scales))
        else:
            values = _scaled(values, scales)
    return values


@triton.jit
def _scaled(values, scales):
    """`[R, C]` times `[R, L]`, each factor for C / L neighbouring columns."""
    ROWS: tl.constexpr = values.shape[0]
    COLS: tl.constexpr = values.shape[1]
    LANES: tl.constexpr = scales.shape[1]
    lanes = tl.reshape(values, (ROWS, LANES, COLS // LANES)) * scales[:, :, None]
    return tl.reshape(lanes, (ROWS, COLS))


@triton.jit
def decode_fp8(codes):
    """e4m3 (uint8) to float32, by the hardware where it has the type (compute capability 8.9)."""
    if target_info.cuda_capability_geq(8, 9):
        return codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        return decode_fp8_bits(codes)


@triton.jit
def decode_fp8_bits(codes):
    """e4m3 (uint8) to float32: its bits are those of a half 2^8 times smaller, subnormals too."""
    bits = codes.to(tl.uint16)
    half = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
    values = half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    return tl.where((bits & 0x7F) == 0x7F, float("nan"), values)


@triton.jit
def decode_fp4(nibbles):
    """e2m1 (the low four bits of uint8) to float32: its bits are those of a half 2^14 times smaller."""
    bits = nibbles.to(tl.uint16)
    half = ((bits & 0x8) << 12) | ((bits & 0x7) << 9)
    return half.to(tl.float16, bitcast=True).to(tl.float32) * 16384.0


@triton.jit
def decode_e8m0(exponents):
    """2^(e - 127) (uint8) to float32. 0 is a subnormal; 255 is NaN."""
    bits = exponents.to(tl.uint32) << 23
    bits = tl.where(exponents == 0, 0x00400000, bits)
    bits = tl.where(exponents == 255, 0x7FC00000, bits)
    return bits.to(tl.uint32).to(tl.float32, bitcast=True)
