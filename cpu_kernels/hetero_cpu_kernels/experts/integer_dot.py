"""Rows of int8 or int4 times a few tokens' digits, as integers.

int8   high and low digits have a sum each over the row; floats are made of them at its end
int4   both make one integer for each vector, exact, which is scaled by its groups and added as a float

arguments   as of `row_kernel`; 3: addresses of the tokens' digits
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from hetero_cpu_kernels.experts.digits import DigitRow
from hetero_cpu_kernels.experts.emitter import F32, I64, LINE_BYTES, Emitter
from hetero_cpu_kernels.experts.form import GROUP_COLUMNS
from hetero_cpu_kernels.experts.integer_rows import IntegerRows
from hetero_cpu_kernels.experts.row_kernel import IN_TURNS, RowKernel, joined
from hetero_cpu_kernels.experts.rows import load_block_scale, load_row_scale
from hetero_cpu_kernels.experts.targets import Target

_MOST_SUMS = 16
"""Vectors that are added to side by side: half of the registers with 16 lanes."""


def write_integer_dot(
    module: ir.Module, name: str, *, rows: IntegerRows, target: Target, tokens: int
) -> None:
    """Add the function `name` for `tokens` tokens to `module`."""
    emit = Emitter(module, name, lanes=target.lanes)
    most = min(target.rows, max(1, _MOST_SUMS * target.lanes // 16 // (2 * tokens)))
    _IntegerDot(emit, rows, tokens).write(1 if tokens == 1 else most)
    emit.finish()


class _IntegerDot(RowKernel):
    _least_steps = IN_TURNS

    def __init__(self, emit: Emitter, rows: IntegerRows, tokens: int) -> None:
        super().__init__(emit, rows, tokens)
        self._rows, self._digits = rows, DigitRow.of(rows, emit.lanes)
        self._token_scales = [emit.splat(emit.load(F32, x)) for x in self._x]

    def _accumulate(self, row: Any) -> list[list[Any]]:
        emit = self._emit
        self._scale_rows = [
            load_row_scale(emit, self._rows, record=self._record, row=emit.add(row, r))
            for r in range(len(self._here))
        ]
        count = self._rows.matrix.cols // self._block
        if self._digits.has_block_corrections:
            sums = self._repeat(count, self._block, self._add_groups, self._zeros(self._in_turns))
            sums = [joined(of_row, len(self._x), emit.build.fadd) for of_row in sums]
            return [list(map(emit.build.fmul, of_row, self._token_scales)) for of_row in sums]
        corrections = [
            emit.load(emit.words, emit.add(x, LINE_BYTES + digit * self._digits.vector_bytes))
            for x in self._x
            for digit in range(2)
        ]
        start = corrections + [emit.word(0)] * ((self._in_turns - 1) * len(corrections))
        sums = self._repeat(count, self._block, self._add_digits, [start for _ in self._here])
        sums = [joined(of_row, len(corrections), emit.build.add) for of_row in sums]
        return [
            self._scaled(of_row, scale_row) for of_row, scale_row in zip(sums, self._scale_rows, strict=True)
        ]

    def _add_digits(self, number: Any, sums: list[list[Any]], inside: int) -> list[list[Any]]:
        """int8: add a block to the sums of each row, `[high of token 0, low of it, high of token 1, ...]`."""
        emit = self._emit
        digits = [vectors[0] for x in self._x for vectors in self._load_digits(x, number)]
        return [
            of_row[len(digits) :]
            + [emit.dot_bytes(weights, digit, total) for digit, total in zip(digits, of_row, strict=False)]
            for (weights,), of_row in zip(self._load_weights(number, inside), sums, strict=True)
        ]

    def _scaled(self, sums: list[Any], scale_row: Any) -> list[Any]:
        """What a row's sums of digits are as floats, for each token."""
        emit, build = self._emit, self._emit.build
        scale = load_block_scale(emit, self._rows, scale_row=scale_row, block=I64(0))
        base = ir.Constant(emit.floats, [256.0] * emit.lanes)
        floats = [build.sitofp(total, emit.floats) for total in sums]
        return [
            build.fmul(emit.fma(high, base, low), build.fmul(scale, of_token))
            for high, low, of_token in zip(floats[::2], floats[1::2], self._token_scales, strict=True)
        ]

    def _add_groups(self, number: Any, sums: list[list[Any]], inside: int) -> list[list[Any]]:
        """int4: add a block, times the scales of its groups, to the sums `[rows][tokens]`."""
        emit, build = self._emit, self._emit.build
        weights = self._load_weights(number, inside)
        scales = [self._group_scales(scale_row, number) for scale_row in self._scale_rows]
        sums = list(sums)
        for x in self._x:
            high_digits, low_digits = self._load_digits(x, number)
            place = emit.add(self._block_at(x, number), 2 * len(high_digits) * self._digits.vector_bytes)
            correction = emit.load(emit.words, place)
            for r, vectors in enumerate(weights):
                high = self._dot(vectors, high_digits, emit.word(0))
                whole = build.add(build.shl(high, emit.word(8)), correction)
                whole = self._dot(vectors, low_digits, whole)
                first, *others = sums[r]
                sums[r] = [*others, emit.fma(build.sitofp(whole, emit.floats), scales[r], first)]
        return sums

    def _dot(self, weights: list[Any], digits: list[Any], total: Any) -> Any:
        for vector, digit in zip(weights, digits, strict=True):
            total = self._emit.dot_bytes(vector, digit, total)
        return total

    def _load_weights(self, number: Any, inside: int) -> list[list[Any]]:
        """`[rows][vectors]` of a block, while what comes later is asked for."""
        column = self._emit.mul(number, self._block)
        if inside % self._rows.line_columns < self._block:
            self._prefetch(column)
        return [self._rows.vectors(self._emit, place, column) for place in self._here]

    def _block_at(self, x: Any, number: Any) -> Any:
        """Address of a block of a token's digits."""
        emit = self._emit
        return emit.add(emit.add(x, self._digits.blocks_at), emit.mul(number, self._digits.block_bytes))

    def _load_digits(self, x: Any, number: Any) -> list[list[Any]]:
        """`[high, low][vectors]` of a block of a token."""
        emit, place = self._emit, self._block_at(x, number)
        count, size = self._digits.vectors, self._digits.vector_bytes
        return [
            [emit.load(emit.words, emit.add(place, (digit * count + v) * size)) for v in range(count)]
            for digit in range(2)
        ]

    def _group_scales(self, scale_row: Any, number: Any) -> Any:
        """A vector with the bfloat16 scale of each lane's group of columns."""
        emit = self._emit
        groups = self._block // GROUP_COLUMNS
        together = emit.load(ir.IntType(16 * groups), emit.add(scale_row, emit.mul(number, 2 * groups)))
        lanes_a_group = emit.lanes // groups
        upper_halves = [(2 * group, 2 * group + 1) for group in range(groups) for _ in range(lanes_a_group)]
        return emit.as_floats(emit.picked_bytes(together, [(-1, -1, *octets) for octets in upper_halves]))
