"""Rows of weights times a few tokens, decoded on the way: what one token is computed with.

One pass reads some rows side by side, so that several streams of cache lines are in flight, and asks for rows
further on while it does (behind the last row: for the first ones of the run that is read next). Each row and
token has one accumulator, which takes the columns in order: the result of a row does not depend on which rows
are read beside it.

    arguments   0 record   1 first row   2 end row   3 addresses of the tokens' activations
                4 result: float32 [tokens, ...]   5 bytes from one token's results to the next
                6 record and 7 row that are read after this run
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from hetero_cpu_kernels.experts.emitter import I64, Emitter
from hetero_cpu_kernels.experts.rows import Rows, load_block_scale, load_row_scale
from hetero_cpu_kernels.experts.targets import Target

_TURN_COLUMNS = 128
"""Columns of one turn of the inner loop, where scale blocks allow: enough to hide its own cost."""


def write_dot(module: ir.Module, name: str, *, rows: Rows, target: Target, tokens: int) -> None:
    """Add the function `name` for `tokens` tokens to `module`."""
    emit = Emitter(module, name, lanes=target.lanes)
    _Dot(emit, rows, tokens).write(rows.side_by_side(target))
    emit.finish()


class _Dot:
    def __init__(self, emit: Emitter, rows: Rows, tokens: int) -> None:
        self._emit, self._rows = emit, rows
        self._block = rows.order(emit.lanes).size
        self._record, self._first, self._end, table, self._y, self._y_stride = map(emit.argument, range(6))
        self._next = emit.argument(6), emit.argument(7)
        self._x = [emit.load(I64, emit.add(table, 8 * t)) for t in range(tokens)]

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
        ahead = count * max(1, -(-self._rows.bytes_ahead // (count * self._rows.matrix.row_bytes)))
        behind_end = build.sub(emit.add(row, ahead), self._end)
        is_inside = build.icmp_signed("<", behind_end, I64(0))
        ahead_record = build.select(is_inside, self._record, self._next[0])
        ahead_row = build.select(is_inside, emit.add(row, ahead), emit.add(self._next[1], behind_end))
        self._here = [self._rows.begin(emit, self._record, emit.add(row, r)) for r in range(count)]
        self._ahead = [self._rows.begin(emit, ahead_record, emit.add(ahead_row, r)) for r in range(count)]
        accs = self._accumulate(row)
        self._store_sums([accs[r][t] for t in range(len(self._x)) for r in range(count)], row, count)

    def _store_sums(self, accs: list[Any], row: Any, count: int) -> None:
        """Add the lanes of the accumulators `[tokens][rows]`, and store each token's rows."""
        emit = self._emit
        at_once = max(count, min(len(accs), emit.lanes))
        place = emit.add(self._y, emit.mul(emit.build.sub(row, self._first), 4))
        for start in range(0, len(accs), at_once):
            sums = emit.sum_lanes(accs[start : start + at_once])
            if self._rows.factor != 1.0:
                sums = emit.build.fmul(sums, ir.Constant(sums.type, [self._rows.factor] * at_once))
            for t in range(at_once // count):
                token_at = emit.mul(self._y_stride, start // count + t)
                emit.store(emit.part(sums, t * count, count), emit.add(place, token_at))

    def _accumulate(self, row: Any) -> list[list[Any]]:
        """`[rows][tokens]` accumulators over all columns."""
        emit, matrix = self._emit, self._rows.matrix
        if matrix.scales is None:
            return self._span(I64(0), matrix.cols, self._zeros())
        scale_rows = [
            load_row_scale(emit, self._rows, record=self._record, row=emit.add(row, r))
            for r in range(len(self._here))
        ]
        group = min(matrix.scales.block_cols, matrix.cols)
        num_groups, rest = divmod(matrix.cols, group)

        def add_group(
            number: Any, accs: list[list[Any]], within: int, columns: int = group
        ) -> list[list[Any]]:
            partial = self._span(emit.mul(number, group), columns, self._zeros(), within)
            scales = [
                load_block_scale(emit, self._rows, scale_row=of_row, block=number) for of_row in scale_rows
            ]
            return [
                [emit.fma(part, scale, acc) for part, acc in zip(parts, of_row, strict=True)]
                for parts, scale, of_row in zip(partial, scales, accs, strict=True)
            ]

        accs = self._repeat(num_groups, group, add_group, self._zeros())
        return add_group(I64(num_groups), accs, 0, rest) if rest else accs

    def _repeat(self, count: int, columns: int, step: Any, accs: list[list[Any]]) -> list[list[Any]]:
        """step(number, accumulators, columns since the turn began) for number in range(count).

        `columns`: of one step. A turn has several steps where they are small.
        """
        emit, tokens = self._emit, len(self._x)
        unroll = max(1, _TURN_COLUMNS // columns)
        whole = count - count % unroll
        if whole <= unroll:
            whole = 0
        else:
            with emit.loop(0, whole, step=unroll, carried=_flatten(accs)) as turn:
                inside = _unflatten(turn.carried, tokens)
                for i in range(unroll):
                    inside = step(emit.add(turn.index, i), inside, i * columns)
                turn.carried = _flatten(inside)
            accs = _unflatten(turn.carried, tokens)
        for number in range(whole, count):
            accs = step(I64(number), accs, (number - whole) * columns)
        return accs

    def _span(self, column: Any, columns: int, accs: list[list[Any]], within: int = 0) -> list[list[Any]]:
        """Add the products of `columns` columns from `column` on, which is `within` the turn around it."""
        num_blocks, rest = divmod(columns, self._block)

        def add_block(number: Any, accs: list[list[Any]], inside: int) -> list[list[Any]]:
            at = self._emit.add(column, self._emit.mul(number, self._block))
            if (within + inside) % self._rows.line_columns < self._block:
                self._prefetch(at)
            weights = [self._rows.vectors(self._emit, place, at) for place in self._here]
            return self._multiply(weights, at, accs)

        accs = self._repeat(num_blocks, self._block, add_block, accs)
        if not rest:
            return accs
        start = self._rows.matrix.cols - rest
        weights = [self._rows.tail(self._emit, place, start) for place in self._here]
        return self._multiply(weights, I64(start), accs)

    def _multiply(self, weights: list[list[Any]], column: Any, accs: list[list[Any]]) -> list[list[Any]]:
        """One block: its vectors `[rows][vectors]` times each token's."""
        emit = self._emit
        accs = [list(of_row) for of_row in accs]
        is_paired = self._rows.is_paired
        kind, multiply = (emit.words, emit.dot_pairs) if is_paired else (emit.floats, emit.fma)
        for t, x in enumerate(self._x):
            start = emit.add(x, emit.mul(column, 2 if is_paired else 4))
            for v in range(len(weights[0])):
                activations = emit.load(kind, emit.add(start, 4 * emit.lanes * v))
                for r, of_row in enumerate(weights):
                    accs[r][t] = multiply(of_row[v], activations, accs[r][t])
        return accs

    def _prefetch(self, column: Any) -> None:
        for place in self._ahead:
            self._rows.prefetch(self._emit, place, column)

    def _zeros(self) -> list[list[Any]]:
        return [[self._emit.zeros() for _ in self._x] for _ in self._here]


def _flatten(accs: list[list[Any]]) -> list[Any]:
    return [acc for of_row in accs for acc in of_row]


def _unflatten(flat: list[Any], width: int) -> list[list[Any]]:
    return [flat[i : i + width] for i in range(0, len(flat), width)]
