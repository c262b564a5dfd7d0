"""A few rows of weights, decoded once and written where all tokens of an expert can use them.

    panel   [rows, padded] float32, or bfloat16 for pairs and tiles; columns as in `activations`

With many tokens the products cost more than reading: a row is decoded once for all of them, scales included,
and the panel stays in the second-level cache.

    arguments   0 record   1 first row   2 end row   3 panel
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from hetero_cpu_kernels.experts.activations import Layout
from hetero_cpu_kernels.experts.emitter import F32, I64, Emitter
from hetero_cpu_kernels.experts.rows import Rows, load_block_scale, load_row_scale
from hetero_cpu_kernels.experts.targets import Target

_LINES_AHEAD = 32
"""Rows follow each other, so what is asked for behind the end of one is the next."""


def write_panel(module: ir.Module, name: str, *, rows: Rows, target: Target, layout: Layout) -> None:
    """Add the function `name` to `module`. `layout`: of the activations that the panel is multiplied with."""
    emit = Emitter(module, name, lanes=target.lanes)
    _Panel(emit, rows, layout).write()
    emit.finish()


class _Panel:
    def __init__(self, emit: Emitter, rows: Rows, layout: Layout) -> None:
        self._emit, self._rows, self._layout = emit, rows, layout
        self._block = rows.order(emit.lanes).size
        self._record, self._first, self._end, self._panel = map(emit.argument, range(4))

    def write(self) -> None:
        emit, matrix = self._emit, self._rows.matrix
        with emit.loop(self._first, self._end) as turn:
            place = self._rows.begin(emit, self._record, turn.index)
            number = emit.build.sub(turn.index, self._first)
            out = emit.add(self._panel, emit.mul(number, self._layout.row_bytes))
            scale_row = None
            if matrix.scales is not None:
                scale_row = load_row_scale(emit, self._rows, record=self._record, row=turn.index)
            num_blocks, rest = divmod(matrix.cols, self._block)
            with emit.loop(0, num_blocks * self._block, step=self._block) as inner:
                self._rows.prefetch(
                    emit, place, emit.add(inner.index, _LINES_AHEAD * self._rows.line_columns)
                )
                self._write_block(self._rows.vectors(emit, place, inner.index), inner.index, out, scale_row)
            start = num_blocks * self._block
            if rest:
                self._write_block(self._rows.tail(emit, place, start), I64(start), out, scale_row)
            self._write_zeros(start + (self._block if rest else 0), out)

    def _write_block(self, vectors: list[Any], column: Any, out: Any, scale_row: Any) -> None:
        emit, matrix = self._emit, self._rows.matrix
        if matrix.scales is not None:
            group = emit.build.udiv(column, I64(matrix.scales.block_cols))
            scale = load_block_scale(emit, self._rows, scale_row=scale_row, block=group)
            factor = emit.build.fmul(scale, ir.Constant(emit.floats, [self._rows.factor] * emit.lanes))
            vectors = [emit.build.fmul(vector, factor) for vector in vectors]
        if self._layout.unit != "float32":
            pairs = zip(vectors[::2], vectors[1::2], strict=True)
            vectors = [_round_to_pairs(emit, first, second) for first, second in pairs]
        start = emit.add(out, emit.mul(column, self._layout.row_bytes // self._layout.padded))
        for v, vector in enumerate(vectors):
            emit.store(vector, emit.add(start, 4 * emit.lanes * v))

    def _write_zeros(self, column: int, out: Any) -> None:
        """Behind the last block, where tiles are wider than that."""
        element = self._layout.row_bytes // self._layout.padded
        for at in range(column * element, self._layout.row_bytes, 4):
            self._emit.store(ir.Constant(F32, 0.0), self._emit.add(out, at))


def _round_to_pairs(emit: Emitter, first: Any, second: Any) -> Any:
    """Words of two bfloat16, rounded to nearest even: `first` in the low half."""
    build = emit.build
    words = []
    for vector in (first, second):
        bits = build.bitcast(vector, emit.words)
        odd = build.and_(build.lshr(bits, emit.word(16)), emit.word(1))
        words.append(build.add(bits, build.add(odd, emit.word(0x7FFF))))
    low = build.lshr(words[0], emit.word(16))
    return build.or_(low, build.and_(words[1], emit.word(0xFFFF0000)))
