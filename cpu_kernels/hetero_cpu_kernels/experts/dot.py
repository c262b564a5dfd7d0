"""Rows of weights times a few tokens, decoded to float32 on the way; or pairs of bfloat16 as they lie."""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from hetero_cpu_kernels.experts.emitter import I64, Emitter
from hetero_cpu_kernels.experts.row_kernel import RowKernel, joined
from hetero_cpu_kernels.experts.rows import Rows, load_block_scale, load_row_scale
from hetero_cpu_kernels.experts.targets import Target


def write_dot(module: ir.Module, name: str, *, rows: Rows, target: Target, tokens: int) -> None:
    """Add the function `name` for `tokens` tokens to `module`. Its arguments: `row_kernel`."""
    emit = Emitter(module, name, lanes=target.lanes)
    _Dot(emit, rows, tokens).write(1 if tokens == 1 else rows.side_by_side(target))
    emit.finish()


class _Dot(RowKernel):
    def __init__(self, emit: Emitter, rows: Rows, tokens: int) -> None:
        super().__init__(emit, rows, tokens)
        self._rows = rows

    def _accumulate(self, row: Any) -> list[list[Any]]:
        """`[rows][tokens]` accumulators over all columns."""
        emit, matrix = self._emit, self._rows.matrix
        if matrix.scales is None:
            return self._span(I64(0), matrix.cols, in_turns=self._in_turns)
        scale_rows = [
            load_row_scale(emit, self._rows, record=self._record, row=emit.add(row, r))
            for r in range(len(self._here))
        ]
        group = min(matrix.scales.block_cols, matrix.cols)
        num_groups, rest = divmod(matrix.cols, group)
        in_turns = self._in_turns if num_groups == 1 else 1  # groups do not wait for each other

        def add_group(
            number: Any, accs: list[list[Any]], within: int, columns: int = group
        ) -> list[list[Any]]:
            partial = self._span(emit.mul(number, group), columns, within=within, in_turns=in_turns)
            scales = [
                load_block_scale(emit, self._rows, scale_row=of_row, block=number) for of_row in scale_rows
            ]
            return [
                [emit.fma(part, scale, acc) for part, acc in zip(parts, of_row, strict=True)]
                for parts, scale, of_row in zip(partial, scales, accs, strict=True)
            ]

        accs = self._repeat(num_groups, group, add_group, self._zeros())
        return add_group(I64(num_groups), accs, 0, rest) if rest else accs

    def _span(self, column: Any, columns: int, *, within: int = 0, in_turns: int = 1) -> list[list[Any]]:
        """Products of `columns` columns from `column` on: `[rows][tokens]`, of `in_turns` accumulators each.

        `within`: where the turn around it is, in columns.
        """
        num_blocks, rest = divmod(columns, self._block)

        def add_block(number: Any, accs: list[list[Any]], inside: int) -> list[list[Any]]:
            at = self._emit.add(column, self._emit.mul(number, self._block))
            if (within + inside) % self._rows.line_columns < self._block:
                self._prefetch(at)
            weights = [self._rows.vectors(self._emit, place, at) for place in self._here]
            return self._multiply(weights, at, accs)

        accs = self._repeat(num_blocks, self._block, add_block, self._zeros(in_turns))
        if rest:
            start = self._rows.matrix.cols - rest
            weights = [self._rows.tail(self._emit, place, start) for place in self._here]
            accs = self._multiply(weights, I64(start), accs)
        return [joined(of_row, len(self._x), self._emit.build.fadd) for of_row in accs]

    def _multiply(self, weights: list[list[Any]], column: Any, accs: list[list[Any]]) -> list[list[Any]]:
        """One block: its vectors `[rows][vectors]` times each token's.

        What was added to goes to the end of its row's accumulators, so that those in front are next.
        """
        emit = self._emit
        is_in_pairs = self._rows.is_in_pairs
        kind, multiply = (emit.words, emit.dot_pairs) if is_in_pairs else (emit.floats, emit.fma)
        starts = [emit.add(x, emit.mul(column, 2 if is_in_pairs else 4)) for x in self._x]
        for v in range(len(weights[0])):
            vectors = [emit.load(kind, emit.add(start, 4 * emit.lanes * v)) for start in starts]
            accs = [
                of_row[len(vectors) :]
                + [multiply(block[v], x, acc) for x, acc in zip(vectors, of_row, strict=False)]
                for block, of_row in zip(weights, accs, strict=True)
            ]
        return accs
