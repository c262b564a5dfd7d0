"""Rows of weights times a few tokens, whatever multiplies: which rows when, what is asked for ahead, sums.

One token is bound by memory, which likes one stream best: row after row, with accumulators that take turns,
so that no product waits for the one before. Several tokens read rows side by side, which share their
activations. All ask for rows further on meanwhile (behind the last row: for the first ones of the run that is
read next), line after line. A row's blocks go to its accumulators in an order of their own: its result does
not depend on which rows are read beside it.

    arguments   0 record   1 first row   2 end row   3 addresses of the tokens' activations
                4 result: float32 [tokens, ...]   5 bytes from one token's results to the next
                6 record and 7 row that are read after this run
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from llvmlite import ir

from hetero_cpu_kernels.experts.emitter import I64, LINE_BYTES, Emitter
from hetero_cpu_kernels.experts.form import BITS
from hetero_cpu_kernels.experts.rows import Walk, load_row_scale

_TURN_COLUMNS = 128
"""Columns of one turn of the inner loop, where scale blocks allow: enough to hide its own cost."""
IN_TURNS = 4
"""Accumulators of a row for one token: a product's latency over its cost."""


class RowKernel(ABC):
    """Writes one kernel, for `tokens` tokens."""

    _least_steps = 1
    """Of one turn of a loop."""

    def __init__(self, emit: Emitter, rows: Walk, tokens: int) -> None:
        self._emit, self._walk = emit, rows
        self._block = rows.order(emit.lanes).size
        self._record, self._first, self._end, table, self._y, self._y_stride = map(emit.argument, range(6))
        self._next = emit.argument(6), emit.argument(7)
        self._x = [emit.load(I64, emit.add(table, 8 * t)) for t in range(tokens)]
        self._in_turns = IN_TURNS if tokens == 1 else 1

    def write(self, side_by_side: int) -> None:
        """All rows: so many at a time, then the rest one by one."""
        emit, build = self._emit, self._emit.build
        rest = build.urem(build.sub(self._end, self._first), I64(side_by_side))
        whole = build.sub(self._end, rest)
        with emit.loop(self._first, whole, step=side_by_side) as turn:
            self._write_rows(turn.index, side_by_side)
        with emit.loop(whole, self._end) as turn:
            self._write_rows(turn.index, 1)

    def _write_rows(self, row: Any, count: int) -> None:
        emit, build = self._emit, self._emit.build
        ahead = count * max(1, -(-self._walk.bytes_ahead // (count * self._walk.matrix.row_bytes)))
        behind_end = build.sub(emit.add(row, ahead), self._end)
        is_inside = build.icmp_signed("<", behind_end, I64(0))
        ahead_record = build.select(is_inside, self._record, self._next[0])
        ahead_row = build.select(is_inside, emit.add(row, ahead), emit.add(self._next[1], behind_end))
        self._here = [self._walk.begin(emit, self._record, emit.add(row, r)) for r in range(count)]
        self._ahead = self._walk.begin(emit, ahead_record, ahead_row)
        if self._walk.matrix.scales is not None:
            self._prefetch_scales(ahead_record, ahead_row, count)
        accs = self._accumulate(row)
        self._store_sums([accs[r][t] for t in range(len(self._x)) for r in range(count)], row, count)

    def _store_sums(self, accs: list[Any], row: Any, count: int) -> None:
        """Add the lanes of the accumulators `[tokens][rows]`, and store each token's rows."""
        emit = self._emit
        at_once = max(count, min(len(accs), emit.lanes))
        place = emit.add(self._y, emit.mul(emit.build.sub(row, self._first), 4))
        for start in range(0, len(accs), at_once):
            sums = emit.sum_lanes(accs[start : start + at_once])
            if self._walk.factor != 1.0:
                sums = emit.build.fmul(sums, ir.Constant(sums.type, [self._walk.factor] * at_once))
            for t in range(at_once // count):
                token_at = emit.mul(self._y_stride, start // count + t)
                emit.store(emit.part(sums, t * count, count), emit.add(place, token_at))

    @abstractmethod
    def _accumulate(self, row: Any) -> list[list[Any]]:
        """`[rows][tokens]` vectors whose lanes add up to the results of the rows from `row` on."""

    def _repeat(self, count: int, columns: int, step: Any, accs: list[list[Any]]) -> list[list[Any]]:
        """step(number, accumulators, columns since the turn began) for number in range(count).

        `columns`: of one step. A turn has several steps where they are small.
        """
        emit, width = self._emit, len(accs[0])
        unroll = max(self._least_steps, _TURN_COLUMNS // columns)
        whole = count - count % unroll
        if whole <= unroll:
            whole = 0
        else:
            with emit.loop(0, whole, step=unroll, carried=_flatten(accs)) as turn:
                inside = _unflatten(turn.carried, width)
                for i in range(unroll):
                    inside = step(emit.add(turn.index, i), inside, i * columns)
                turn.carried = _flatten(inside)
            accs = _unflatten(turn.carried, width)
        for number in range(whole, count):
            accs = step(I64(number), accs, (number - whole) * columns)
        return accs

    def _prefetch(self, column: Any) -> None:
        """Ask for as much as is read at a column of the rows: line after line, whatever row it is of."""
        emit, count = self._emit, len(self._here)
        begin = emit.mul(column, count)
        step = max(self._block, self._walk.line_columns)
        for i in range(count):
            self._walk.prefetch(emit, self._ahead, emit.add(begin, i * step))

    def _prefetch_scales(self, record: Any, row: Any, count: int) -> None:
        """Ask for the scales of rows that are read later."""
        emit, matrix = self._emit, self._walk.matrix
        assert matrix.scales is not None, "only matrices with scales are asked for them"
        row_bytes = matrix.scale_shape[2] * BITS[matrix.scales.encoding] // 8
        place = load_row_scale(emit, self._walk, record=record, row=row)
        for begin in range(0, row_bytes * (count if matrix.scales.block_rows == 1 else 1), LINE_BYTES):
            emit.prefetch(emit.add(place, begin))

    def _zeros(self, in_turns: int = 1) -> list[list[Any]]:
        return [[self._emit.zeros() for _ in range(in_turns * len(self._x))] for _ in self._here]


def joined(accs: list[Any], count: int, add: Any) -> list[Any]:
    """`count` accumulators of several times, a power of two, as many that took turns."""
    while len(accs) > count:
        half = len(accs) // 2
        accs = list(map(add, accs[:half], accs[half:]))
    return accs


def _flatten(accs: list[list[Any]]) -> list[Any]:
    return [acc for of_row in accs for acc in of_row]


def _unflatten(flat: list[Any], width: int) -> list[list[Any]]:
    return [flat[i : i + width] for i in range(0, len(flat), width)]
