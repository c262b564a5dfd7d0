"""Rows of fp8 whose numbers are looked up as bfloat16, 64 at a time, by processors that look up bytes.

    byte      |s|eeee|mmm|    the lower seven bits choose both bytes of a bfloat16 from tables, s is its sign
    words     64 bytes are two vectors of pairs, as halves of their 16-byte groups are interleaved:
              the first has columns 0-7, 16-23, 32-39, 48-55, the second those between
    vectors   the even columns of the first, its odd ones, the even and the odd ones of the second

Every fp8 number is a bfloat16, the smallest ones too, and half of a word becomes float32 for one operation.
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
class LookedUpRows:
    """A place is an address, as in `rows.PlainRows`; rows are whole blocks, and so have no tail."""

    matrix: Matrix
    factor = 1.0
    is_in_pairs = False
    line_columns = LINE_BYTES
    bytes_ahead = BYTES_AHEAD

    def side_by_side(self, target: Target) -> int:
        return min(2, target.rows)  # sums of a scale block and of the row are in registers

    def order(self, lanes: int) -> npt.NDArray[np.int64]:
        pairs = self._pairs()
        return np.ascontiguousarray(pairs.reshape(2, lanes, 2).swapaxes(1, 2).reshape(4, lanes))

    def begin(self, emit: Emitter, record: Any, row: Any) -> Any:
        return emit.add(emit.add(record, self.matrix.offset), emit.mul(row, self.matrix.row_bytes))

    def vectors(self, emit: Emitter, place: Any, column: Any) -> list[Any]:
        build = emit.build
        vectors = []
        for words in self._words(emit, emit.load(ir.VectorType(I8, _BLOCK), emit.add(place, column))):
            vectors.append(emit.as_floats(build.shl(words, emit.word(16))))
            vectors.append(emit.as_floats(build.and_(words, emit.word(0xFFFF0000))))
        return vectors

    def tail(self, emit: Emitter, place: Any, column: int) -> list[Any]:
        raise AssertionError("looked-up rows are whole blocks: they have no tail")

    def prefetch(self, emit: Emitter, place: Any, column: Any) -> None:
        emit.prefetch(emit.add(place, column))

    def _pairs(self) -> npt.NDArray[np.int64]:
        """`[words, 2 · lanes]`: the column of each half word."""
        groups = np.arange(_BLOCK).reshape(-1, 2, _HALF_GROUP)  # [groups, halves, columns]
        return groups.swapaxes(0, 1).reshape(2, -1)

    def _words(self, emit: Emitter, codes: Any) -> list[Any]:
        """Two vectors of pairs of bfloat16 from 64 bytes."""
        build = emit.build
        halves = decode_fp8(np.arange(128, dtype=np.uint8)).view(np.uint32) >> 16
        low = emit.look_up_bytes(codes, (halves & 0xFF).tolist())
        high = emit.look_up_bytes(codes, (halves >> 8).tolist())
        high = build.or_(high, build.and_(codes, ir.Constant(codes.type, [0x80] * _BLOCK)))
        words = []
        for columns in self._pairs().tolist():
            mask = [index for c in columns for index in (c, _BLOCK + c)]
            pairs = build.shuffle_vector(low, high, ir.Constant(ir.VectorType(I32, _BLOCK), mask))
            words.append(build.bitcast(pairs, emit.words))
        return words


def looked_up_rows_of(matrix: Matrix, target: Target) -> LookedUpRows | None:
    """The rows of a matrix that the target looks up; None where it does not: fp8 in whole blocks."""
    if not target.looks_up_bytes or matrix.encoding != "fp8" or matrix.scales is None:
        return None
    is_whole = matrix.cols % _BLOCK == 0 and (
        matrix.scales.block_cols >= matrix.cols or matrix.scales.block_cols % _BLOCK == 0
    )
    return LookedUpRows(matrix) if is_whole else None
