"""What the kernels must give: plain numpy, float32, one expert after the other."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hetero_cpu_kernels.experts.form import Bias, ExpertForm, Gate, Matrix, Scales

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

_INT4 = np.arange(-8, 8, dtype=np.float32)
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=np.float32)


def expert_reference(x: Floats, record: Bytes, form: ExpertForm) -> Floats:
    """One expert: `[T, H]` to `[T, H]`. `record`: uint8 `[record_bytes]`, as it was before any packing."""
    y = x @ dequantize(record, form.up).T + bias_of(record, form.up)
    return apply_gate(y, form.gate) @ dequantize(record, form.down).T + bias_of(record, form.down)


def apply_gate(y: Floats, gate: Gate) -> Floats:
    """`[T, 2I]` to `[T, I]`."""
    half = y.shape[1] // 2
    g, u = (y[:, ::2], y[:, 1::2]) if gate.is_interleaved else (y[:, :half], y[:, half:])
    if gate.function != "silu":
        g, u = np.minimum(g, np.float32(gate.limit)), np.clip(u, -gate.limit, gate.limit).astype(np.float32)
    alpha = np.float32(gate.alpha if gate.function == "gpt_oss" else 1.0)
    gated: Floats = g / (1 + np.exp(-alpha * g))
    return gated * (u + 1) if gate.function == "gpt_oss" else gated * u


def dequantize(record: Bytes, matrix: Matrix) -> Floats:
    """Float32 `[rows, cols]`."""
    data = record[matrix.offset : matrix.offset + matrix.num_bytes]
    values = _values(data, matrix.encoding).reshape(matrix.rows, matrix.cols)
    return values if matrix.scales is None else values * _factors(record, matrix, matrix.scales)


def bias_of(record: Bytes, matrix: Matrix) -> Floats:
    """Float32 `[rows]`; zeros without a bias."""
    if matrix.bias is None:
        return np.zeros(matrix.rows, dtype=np.float32)
    return _floats(record, matrix.bias, matrix.rows)


def decode_fp8(data: Bytes) -> Floats:
    """e4m3 to float32, the two NaN patterns as ±480."""
    exponent, mantissa = (data >> 3 & 0xF).astype(np.int32), (data & 7).astype(np.float32)
    size = np.where(exponent == 0, np.ldexp(mantissa, -9), np.ldexp(8 + mantissa, exponent - 10))
    return np.where(data >> 7, -size, size).astype(np.float32)


def _values(data: Bytes, encoding: str) -> Floats:
    """All values of a matrix, flat."""
    if encoding in ("int4", "fp4"):
        codes = np.stack((data & 0xF, data >> 4), axis=-1).reshape(-1)
        return (_INT4 if encoding == "int4" else _E2M1)[codes]
    if encoding == "fp8":
        return decode_fp8(data)
    return data.view(np.int8).astype(np.float32) if encoding == "int8" else _to_float32(data, encoding)


def _to_float32(data: Bytes, encoding: str) -> Floats:
    if encoding == "bfloat16":
        return (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    if encoding == "e8m0":
        return np.ldexp(np.float32(1), data.astype(np.int32) - 127).astype(np.float32)
    return data.view(encoding).astype(np.float32)


def _factors(record: Bytes, matrix: Matrix, scales: Scales) -> Floats:
    """The scale of every element, `[rows, cols]`."""
    parts, row_blocks, col_blocks = matrix.scale_shape
    flat = _floats(record, scales, parts * row_blocks * col_blocks).reshape(matrix.scale_shape)
    wide = flat.repeat(scales.block_rows, 1)[:, : matrix.rows // parts]
    return wide.repeat(scales.block_cols, 2)[..., : matrix.cols].reshape(matrix.rows, matrix.cols)


def _floats(record: Bytes, array: Scales | Bias, length: int) -> Floats:
    width = {"float32": 4, "float16": 2, "bfloat16": 2, "e8m0": 1}[array.encoding]
    return _to_float32(record[array.offset : array.offset + length * width].copy(), array.encoding)
