"""Rows of int8 and int4 for instructions that multiply unsigned bytes with signed ones: weight + offset.

Vectors are of words of four bytes, whole blocks only: a block is one load of a vector.

    int8   byte b: column b                                offset 128, which flips the sign's bit
    int4   low halves: columns 0, 2, 4 ..; high: 1, 3 ..   offset 8, as the codes have it
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hetero_cpu_kernels.experts.emitter import I64, LINE_BYTES, Emitter
from hetero_cpu_kernels.experts.form import BITS, GROUP_COLUMNS, Matrix
from hetero_cpu_kernels.experts.rows import BYTES_AHEAD
from hetero_cpu_kernels.experts.targets import Target


@dataclass(frozen=True)
class IntegerRows:
    """A place is an address, as in `rows.PlainRows`."""

    matrix: Matrix
    factor = 1.0
    bytes_ahead = BYTES_AHEAD

    @property
    def offset(self) -> int:
        """What unsigned bytes are larger than the weights."""
        return 1 << BITS[self.matrix.encoding] - 1

    @property
    def line_columns(self) -> int:
        return 8 * LINE_BYTES // BITS[self.matrix.encoding]

    def order(self, lanes: int) -> npt.NDArray[np.int64]:
        """`[vectors, 4 · lanes]`: the column of a block that each byte is of."""
        vectors = 8 // BITS[self.matrix.encoding]
        return np.arange(4 * lanes * vectors).reshape(-1, vectors).T

    def begin(self, emit: Emitter, record: Any, row: Any) -> Any:
        return emit.add(emit.add(record, self.matrix.offset), emit.mul(row, self.matrix.row_bytes))

    def vectors(self, emit: Emitter, place: Any, column: Any) -> list[Any]:
        """The block that starts at a column, weight + offset."""
        build = emit.build
        words = emit.load(emit.words, self._address(emit, place, column))
        if self.matrix.encoding == "int8":
            return [build.xor(words, emit.word(0x80808080))]
        halves = emit.word(0x0F0F0F0F)
        return [build.and_(words, halves), build.and_(build.lshr(words, emit.word(4)), halves)]

    def prefetch(self, emit: Emitter, place: Any, column: Any) -> None:
        emit.prefetch(self._address(emit, place, column))

    def _address(self, emit: Emitter, place: Any, column: Any) -> Any:
        columns_a_byte = 8 // BITS[self.matrix.encoding]
        return emit.add(place, emit.build.udiv(column, I64(columns_a_byte)))


def integer_rows_of(matrix: Matrix, target: Target) -> IntegerRows | None:
    """The rows of a matrix whose weights the target multiplies as bytes; None where it does not.

    int8 with one scale a row, int4 with one of bfloat16 for each 32 columns of it, in whole blocks.
    """
    scales = matrix.scales
    if not target.multiplies_bytes or scales is None or scales.block_rows != 1:
        return None
    rows = IntegerRows(matrix)
    if matrix.encoding == "int8":
        is_known = scales.block_cols >= matrix.cols
    else:
        is_known = matrix.encoding == "int4" and (scales.encoding, scales.block_cols) == (
            "bfloat16",
            GROUP_COLUMNS,
        )
    return rows if is_known and matrix.cols % rows.order(target.lanes).size == 0 else None
