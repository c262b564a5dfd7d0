"""What decoded weights are multiplied with: their scale, and what their decoding leaves out."""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from hetero_cpu_kernels.experts.emitter import F32, I32, I64, LINE_BYTES, Emitter
from hetero_cpu_kernels.experts.form import BITS
from hetero_cpu_kernels.experts.rows import Rows, load_block_scale, load_row_scale


def factor_at(emit: Emitter, rows: Rows, *, scale_row: Any, column: Any) -> Any:
    """What the vectors at a column are multiplied with. `scale_row`: address of its row's first scale."""
    assert rows.matrix.scales is not None, f"a matrix of {rows.matrix.encoding} has no scales"
    block = emit.build.udiv(column, I64(rows.matrix.scales.block_cols))
    scale = load_block_scale(emit, rows, scale_row=scale_row, block=block)
    return emit.build.fmul(scale, ir.Constant(emit.floats, [rows.factor] * emit.lanes))


class RowFactors:
    """Of rows that are read side by side: found once, not at every column. `most`: of the rows."""

    def __init__(self, emit: Emitter, rows: Rows, *, most: int) -> None:
        self._emit, self._rows, self._most = emit, rows, most
        scales = rows.matrix.scales
        self._is_by_row = scales is not None and scales.block_cols >= rows.matrix.cols
        if scales is not None:
            with emit.build.goto_entry_block():
                table = emit.build.alloca(I64, most)  # the factor of a whole row, else its scales' address
                self._table = emit.build.ptrtoint(table, I64)

    def find(self, record: Any, first: Any, *, num_rows: int) -> None:
        """Those of the rows from `first` on."""
        emit = self._emit
        if self._rows.matrix.scales is None:
            return
        with emit.loop(0, num_rows) as turn:
            place = emit.add(self._table, emit.mul(turn.index, 8))
            found = load_row_scale(emit, self._rows, record=record, row=emit.add(first, turn.index))
            if self._is_by_row:
                found = emit.build.extract_element(
                    factor_at(emit, self._rows, scale_row=found, column=I64(0)), I32(0)
                )
            emit.store(found, place)

    def at(self, number: Any, column: Any) -> Any:
        """Of a row, counted from the first one, at a column; None without scales."""
        emit = self._emit
        if self._rows.matrix.scales is None:
            return None
        place = emit.add(self._table, emit.mul(number, 8))
        if self._is_by_row:
            return emit.splat(emit.load(F32, place))
        return factor_at(emit, self._rows, scale_row=emit.load(I64, place), column=column)

    def ask(self, record: Any, first: Any, *, part: Any, parts: int) -> None:
        """One of so many parts of the scales of the rows that come next, where every row has its own."""
        emit, scales = self._emit, self._rows.matrix.scales
        if scales is None or scales.block_rows > 1:
            return
        row_bytes = self._rows.matrix.scale_shape[2] * BITS[scales.encoding] // 8
        num_lines = -(-self._most * row_bytes // LINE_BYTES) + 1  # the first one may begin before
        at_once = -(-num_lines // parts)
        with emit.build.if_then(emit.build.icmp_signed("<", part, I64(-(-num_lines // at_once)))):
            start = load_row_scale(emit, self._rows, record=record, row=first)
            place = emit.add(start, emit.mul(part, at_once * LINE_BYTES))
            for line in range(at_once):
                emit.prefetch(emit.add(place, line * LINE_BYTES), level=2)
