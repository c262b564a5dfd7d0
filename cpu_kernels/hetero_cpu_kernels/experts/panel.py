"""A few rows of weights, decoded once and written where all tokens of an expert can use them.

    float32   [rows, padded]            columns as in `activations`
    pairs     [rows, padded] bfloat16
    tiles     [groups of 16 rows, padded / 32, 16 rows, 32] bfloat16, a line between tiles

With many tokens the products cost more than reading: a row is decoded once for all of them, scales included,
and the panel stays in the second-level cache. For tiles rows of bfloat16 are copied: so memory is read row
after row, and a tile is 16 lines that follow each other, not lines of 16 pages.

    arguments   0 record   1 first row   2 end row   3 panel
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir

from hetero_cpu_kernels.experts.activations import PANEL_TILE_BYTES, TILE, TILE_COLUMNS, Layout
from hetero_cpu_kernels.experts.emitter import I64, LINE_BYTES, Emitter
from hetero_cpu_kernels.experts.row_factors import factor_at
from hetero_cpu_kernels.experts.rows import Rows, load_row_scale
from hetero_cpu_kernels.experts.targets import Target

_LINES_AHEAD = 32
"""Rows follow each other, so what is asked for behind the end of one is the next."""


def write_panel(module: ir.Module, name: str, *, rows: Rows, target: Target, layout: Layout) -> None:
    """Add the function `name` to `module`. `layout`: of the activations that the panel is multiplied with."""
    emit = Emitter(module, name, lanes=target.lanes)
    _Panel(emit, rows, layout).write()
    emit.finish()


def in_units(emit: Emitter, rows: Rows, *, layout: Layout, vectors: list[Any], factor: Any) -> list[Any]:
    """A block's vectors times a factor (or None), as `layout` multiplies them."""
    if factor is not None:
        vectors = [emit.build.fmul(vector, factor) for vector in vectors]
    if layout.unit != "float32" and not rows.is_in_pairs:
        vectors = list(map(emit.round_to_pairs, vectors[::2], vectors[1::2]))
    return vectors


class _Panel:
    def __init__(self, emit: Emitter, rows: Rows, layout: Layout) -> None:
        self._emit, self._rows, self._layout = emit, rows, layout
        self._block = rows.order(emit.lanes).size
        self._record, self._first, self._end, self._panel = map(emit.argument, range(4))

    def write(self) -> None:
        with self._emit.loop(self._first, self._end) as turn:
            self._write_row(turn.index)

    def _write_row(self, row: Any) -> None:
        """All blocks; as many in a turn as have a cache line, so that none is asked for twice."""
        emit, rows, block = self._emit, self._rows, self._block
        place = rows.begin(emit, self._record, row)
        out = emit.add(self._panel, self._row_at(emit.build.sub(row, self._first)))
        factor_of = self._factors(row)
        num_blocks, rest = divmod(rows.matrix.cols, block)
        together = max(1, rows.line_columns // block)
        whole = num_blocks - num_blocks % together
        with emit.loop(0, whole * block, step=together * block) as turn:
            rows.prefetch(emit, place, emit.add(turn.index, _LINES_AHEAD * rows.line_columns))
            for i in range(together):
                column = emit.add(turn.index, i * block)
                self._write_block(rows.vectors(emit, place, column), column, out, factor_of)
        for number in range(whole, num_blocks):
            column = I64(number * block)
            self._write_block(rows.vectors(emit, place, column), column, out, factor_of)
        if rest:
            column = I64(num_blocks * block)
            self._write_block(rows.tail(emit, place, num_blocks * block), column, out, factor_of)

    def _factors(self, row: Any) -> Callable[[Any], Any] | None:
        """What the vectors at a column of a row are multiplied with; None without scales."""
        emit, rows = self._emit, self._rows
        scales = rows.matrix.scales
        if scales is None:
            return None
        scale_row = load_row_scale(emit, rows, record=self._record, row=row)
        if scales.block_cols < rows.matrix.cols:
            return lambda column: factor_at(emit, rows, scale_row=scale_row, column=column)
        of_row = factor_at(emit, rows, scale_row=scale_row, column=I64(0))
        return lambda column: of_row

    def _write_block(
        self, vectors: list[Any], column: Any, out: Any, factor_of: Callable[[Any], Any] | None
    ) -> None:
        emit = self._emit
        factor = None if factor_of is None else factor_of(column)
        vectors = in_units(emit, self._rows, layout=self._layout, vectors=vectors, factor=factor)
        element, step = self._layout.row_bytes // self._layout.padded, 4 * emit.lanes
        if self._layout.unit == "tiles":
            element, step = PANEL_TILE_BYTES // TILE_COLUMNS, PANEL_TILE_BYTES
        start = emit.add(out, emit.mul(column, element))
        for v, vector in enumerate(vectors):
            emit.store(vector, emit.add(start, step * v))

    def _row_at(self, number: Any) -> Any:
        """Where a row of the panel begins, in bytes."""
        emit, row_bytes = self._emit, self._layout.panel_row_bytes
        if self._layout.unit != "tiles":
            return emit.mul(number, row_bytes)
        within = emit.build.and_(number, I64(TILE - 1))
        group = emit.mul(emit.build.sub(number, within), row_bytes)
        return emit.add(group, emit.mul(within, LINE_BYTES))
