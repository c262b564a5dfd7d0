"""Rows of weights times a few tokens, decoded on the way: what one token is computed with.

One pass reads `target.rows` rows side by side, so that several streams of cache lines are in flight, and asks
for the rows after those while it does (behind the last row: for the first ones of the next run of rows). Each
row and token has one accumulator, which takes the columns in order: the result of a row does not depend on
which rows are read beside it.

    arguments   0 record   1 first row   2 end row   3 addresses of the tokens' activations
                4 result: float32 [tokens, ...]   5 bytes from one token's results to the next
                6 record and 7 row that are read after this run
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from hetero_cpu_kernels.experts.emitter import I64, Emitter
from hetero_cpu_kernels.experts.rows import Rows, load_factor, load_row_scale
from hetero_cpu_kernels.experts.targets import Target

_TURN_COLUMNS = 128
"""Columns of one turn of the inner loop, where scale blocks allow: enough to hide its own cost."""


def write_dot(module: ir.Module, name: str, *, rows: Rows, target: Target, tokens: int) -> None:
    """Add the function `name` for `tokens` tokens to `module`."""
    emit = Emitter(module, name, lanes=target.lanes)
    _Dot(emit, rows, tokens).write(target.rows)
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
        is_inside = build.icmp_signed("<=", emit.add(row, 2 * count), self._end)
        ahead_record = build.select(is_inside, self._record, self._next[0])
        ahead_row = build.select(is_inside, emit.add(row, count), self._next[1])
        self._here = [self._rows.begin(emit, self._record, emit.add(row, r)) for r in range(count)]
        self._ahead = [self._rows.begin(emit, ahead_record, emit.add(ahead_row, r)) for r in range(count)]
        sums = [[emit.sum_lanes(acc) for acc in of_row] for of_row in self._accumulate(row)]
        place = emit.add(self._y, emit.mul(build.sub(row, self._first), 4))
        for r, of_row in enumerate(sums):
            for t, total in enumerate(of_row):
                emit.store(total, emit.add(emit.add(place, 4 * r), emit.mul(self._y_stride, t)))

    def _accumulate(self, row: Any) -> list[list[Any]]:
        """`[rows][tokens]` accumulators over all columns."""
        emit, matrix = self._emit, self._rows.matrix
        if matrix.scales is None:
            return self._span(I64(0), matrix.cols, self._zeros())
        scale_rows = [
            load_row_scale(emit, self._rows, self._record, emit.add(row, r)) for r in range(len(self._here))
        ]
        group = min(matrix.scales.block_cols, matrix.cols)
        num_groups, rest = divmod(matrix.cols, group)
        unroll = max(1, _TURN_COLUMNS // group)

        def add_group(number: Any, columns: int, accs: list[list[Any]]) -> list[list[Any]]:
            partial = self._span(emit.mul(number, group), columns, self._zeros())
            factors = [emit.splat(load_factor(emit, self._rows, of_row, number)) for of_row in scale_rows]
            return [
                [emit.fma(part, factor, acc) for part, acc in zip(parts, of_row, strict=True)]
                for parts, factor, of_row in zip(partial, factors, accs, strict=True)
            ]

        accs = self._repeat(num_groups, unroll, lambda number, accs: add_group(number, group, accs))
        return add_group(I64(num_groups), rest, accs) if rest else accs

    def _repeat(self, count: int, unroll: int, step: Any, start: list[list[Any]] | None = None) -> Any:
        """step(number, accumulators) for number in range(count), `unroll` of them a turn."""
        emit, tokens = self._emit, len(self._x)
        accs = self._zeros() if start is None else start
        whole = count - count % unroll
        if whole > unroll:
            with emit.loop(0, whole, step=unroll, carried=_flatten(accs)) as turn:
                inside = _unflatten(turn.carried, tokens)
                for i in range(unroll):
                    inside = step(emit.add(turn.index, i), inside)
                turn.carried = _flatten(inside)
            accs = _unflatten(turn.carried, tokens)
        else:
            whole = 0
        for number in range(whole, count):
            accs = step(I64(number), accs)
        return accs

    def _span(self, column: Any, columns: int, accs: list[list[Any]]) -> list[list[Any]]:
        """Add the products of `columns` columns from `column` on."""
        num_blocks, rest = divmod(columns, self._block)

        def add_block(number: Any, accs: list[list[Any]]) -> list[list[Any]]:
            at = self._emit.add(column, self._emit.mul(number, self._block))
            self._prefetch(at)
            weights = [self._rows.vectors(self._emit, place, at) for place in self._here]
            return self._multiply(weights, at, accs)

        accs = self._repeat(num_blocks, max(1, _TURN_COLUMNS // self._block), add_block, accs)
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
