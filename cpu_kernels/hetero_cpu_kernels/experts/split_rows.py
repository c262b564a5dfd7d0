"""Rows of fp8 as pairs of bfloat16, for instructions that multiply those with activations of two terms.

    byte      |s|eeee|mmm|    the lower seven bits choose both bytes of a bfloat16 from tables, s is its sign
    block     64 bytes; halves of its 16-byte groups become a vector each, as bytes are interleaved:
              vector 0 has columns 0-7, 16-23, 32-39, 48-55, vector 1 those between

Every fp8 number is a bfloat16, the smallest ones too. An activation is the nearest bfloat16 and one for what
that lacks (`activations`, split), so it keeps sixteen bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir

from hetero_cpu_kernels.experts.emitter import I8, I32, LINE_BYTES, Emitter
from hetero_cpu_kernels.experts.form import Matrix
from hetero_cpu_kernels.experts.reference import decode_fp8
from hetero_cpu_kernels.experts.rows import BYTES_AHEAD
from hetero_cpu_kernels.experts.targets import Target

_BLOCK = 64
_HALF_GROUP = 8


@dataclass(frozen=True)
class SplitRows:
    """A place is an address, as in `rows.PlainRows`; rows are whole blocks, and so have no tail."""

    matrix: Matrix
    factor = 1.0
    terms = 2
    line_columns = LINE_BYTES
    bytes_ahead = BYTES_AHEAD

    def side_by_side(self, target: Target) -> int:
        return target.rows

    def order(self, lanes: int) -> npt.NDArray[np.int64]:
        groups = np.arange(_BLOCK).reshape(-1, 2, _HALF_GROUP)  # [groups, halves, columns]
        return np.ascontiguousarray(groups.swapaxes(0, 1).reshape(2, -1))

    def begin(self, emit: Emitter, record: Any, row: Any) -> Any:
        return emit.add(emit.add(record, self.matrix.offset), emit.mul(row, self.matrix.row_bytes))

    def vectors(self, emit: Emitter, place: Any, column: Any) -> list[Any]:
        build, kind = emit.build, ir.VectorType(I8, _BLOCK)
        codes = emit.load(kind, emit.add(place, column))
        halves = decode_fp8(np.arange(128, dtype=np.uint8)).view(np.uint32) >> 16
        low = emit.look_up_bytes(codes, (halves & 0xFF).tolist())
        high = emit.look_up_bytes(codes, (halves >> 8).tolist())
        high = build.or_(high, build.and_(codes, ir.Constant(kind, [0x80] * _BLOCK)))
        vectors = []
        for columns in self.order(emit.lanes).tolist():
            mask = [index for c in columns for index in (c, _BLOCK + c)]
            pairs = build.shuffle_vector(low, high, ir.Constant(ir.VectorType(I32, _BLOCK), mask))
            vectors.append(build.bitcast(pairs, emit.words))
        return vectors

    def tail(self, emit: Emitter, place: Any, column: int) -> list[Any]:
        raise AssertionError("split rows are whole blocks: they have no tail")

    def prefetch(self, emit: Emitter, place: Any, column: Any) -> None:
        emit.prefetch(emit.add(place, column))


def split_rows_of(matrix: Matrix, target: Target) -> SplitRows | None:
    """The rows of a matrix that the target multiplies so; None where it does not: fp8 in whole blocks."""
    if not target.splits_fp8 or matrix.encoding != "fp8" or matrix.scales is None:
        return None
    is_whole = matrix.cols % _BLOCK == 0 and (
        matrix.scales.block_cols >= matrix.cols or matrix.scales.block_cols % _BLOCK == 0
    )
    return SplitRows(matrix) if is_whole else None
