"""Random experts in any format, in slabs with NaN between the fields: for the kernels' tests and bench."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from hetero_gpu.experts.layout import Bias, Encoding, ExpertFormat, Gate, Matrix, Scales

_ITEM = {"float32": 4, "float16": 2, "bfloat16": 2, "e8m0": 1}
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_RECORD_ALIGN = 4096


@dataclass(frozen=True)
class Case:
    """One way to write experts. `block`: of the scales; None in columns: the whole row."""

    encoding: Encoding
    scale: str = "float32"
    block: tuple[int, int | None] = (1, None)
    is_transposed: bool = False
    has_bias: bool = False

    def __str__(self) -> str:
        parts: list[object] = [self.encoding]
        if self.encoding not in _DTYPES:
            parts += [self.scale, "x".join("row" if b is None else str(b) for b in self.block)]
        return "-".join(map(str, parts)) + "-T" * self.is_transposed + "-bias" * self.has_bias


class _Room:
    """Hands out byte offsets, each aligned as the records of the runtime are."""

    def __init__(self) -> None:
        self.end = 0

    def take(self, num_bytes: int) -> int:
        offset = self.end
        self.end += -(-num_bytes // 128) * 128
        return offset


def make_format(case: Case, hidden: int, intermediate: int, gate: Gate) -> ExpertFormat:
    """An expert of `case` whose fields lie one after another."""
    room = _Room()
    up = _matrix(case, room, rows=2 * intermediate, cols=hidden, parts=1 if gate.is_interleaved else 2)
    down = _matrix(case, room, rows=hidden, cols=intermediate, parts=1)
    return ExpertFormat(-(-room.end // _RECORD_ALIGN) * _RECORD_ALIGN, up, down, gate)


def _matrix(case: Case, room: _Room, *, rows: int, cols: int, parts: int) -> Matrix:
    bits = {"fp8": 8, "int8": 8, "int4": 4, "fp4": 4}.get(case.encoding) or 8 * _ITEM[case.encoding]
    offset = room.take(rows * cols * bits // 8)
    scales = bias = None
    if case.encoding not in _DTYPES:
        block_rows, block_cols = case.block[0], case.block[1] or cols
        count = parts * math.ceil(rows / parts / block_rows) * math.ceil(cols / block_cols)
        start = room.take(count * _ITEM[case.scale])
        scales = Scales(start, case.scale, block_rows, block_cols, parts)  # type: ignore[arg-type]
    if case.has_bias:
        bias = Bias(room.take(rows * 2), "bfloat16")
    return Matrix(offset, case.encoding, rows, cols, case.is_transposed, scales, bias)


def used_bytes(form: ExpertFormat) -> int:
    """Bytes of one expert that a computation must read, without the room between fields."""
    total = 0
    for matrix in (form.up, form.down):
        total += matrix.num_bytes
        if matrix.scales is not None:
            total += math.prod(matrix.scale_shape) * _ITEM[matrix.scales.encoding]
        if matrix.bias is not None:
            total += matrix.rows * _ITEM[matrix.bias.encoding]
    return total


def random_slabs(form: ExpertFormat, num_slabs: int) -> torch.Tensor:
    """uint8 `[num_slabs, record_bytes]`: weights of size 1 / sqrt(inputs), and NaN in between."""
    slabs = torch.full((num_slabs, form.record_bytes), 0xFF, dtype=torch.uint8)
    for slab in slabs:
        for matrix in (form.up, form.down):
            _fill(slab, matrix)
    return slabs


def _fill(slab: torch.Tensor, matrix: Matrix) -> None:
    size, count = matrix.cols**-0.5, matrix.rows * matrix.cols
    if matrix.encoding in _DTYPES:
        _put(slab, matrix.offset, (torch.randn(count) * size).to(_DTYPES[matrix.encoding]))
    elif matrix.encoding == "fp8":
        _put(slab, matrix.offset, torch.randn(count).to(torch.float8_e4m3fn))
    else:
        codes = torch.randint(0, 256, (matrix.num_bytes,), dtype=torch.uint8)
        _put(slab, matrix.offset, codes)
    if matrix.scales is not None:
        size /= {"fp8": 1.0, "int8": 74.0, "int4": 4.6, "fp4": 2.9}[matrix.encoding]
        factors = size * (0.5 + torch.rand(math.prod(matrix.scale_shape)))
        if matrix.scales.encoding == "e8m0":
            _put(slab, matrix.scales.offset, factors.to(torch.float8_e8m0fnu))
        else:
            _put(slab, matrix.scales.offset, factors.to(_DTYPES[matrix.scales.encoding]))
    if matrix.bias is not None:
        _put(slab, matrix.bias.offset, torch.randn(matrix.rows).bfloat16())


def _put(slab: torch.Tensor, offset: int, values: torch.Tensor) -> None:
    data = values.view(torch.uint8)
    slab[offset : offset + data.numel()] = data


def random_routing(num_tokens: int, top_k: int, num_experts: int) -> torch.Tensor:
    """Experts of each token, int64 `[T, K]`, no expert twice for one token."""
    return torch.rand(num_tokens, num_experts).argsort(dim=1)[:, :top_k]


def relative_error(reference: torch.Tensor, actual: torch.Tensor) -> float:
    """Root mean square of the error over that of the reference; NaN if any element is."""
    reference, actual = reference.float().cpu(), actual.float().cpu()
    return float(((reference - actual).square().mean() / reference.square().mean()).sqrt())
