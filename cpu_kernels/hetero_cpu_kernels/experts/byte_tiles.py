"""Tiles of int8: 16 rows of weights, as they lie, times the digits of 16 tokens.

Products of bytes are exact integers, and each of the two digits has a sum of its own:

    tile   0 1    sums: rows 0-15 by high digits, by low ones     4 5   weights: rows 0-15, 16-31
           2 3    rows 16-31 by the same                          6 7   digits: high, low

    result = (256 · sum of high + sum of low) · scale of the row · scale of the token

No sum is off by rounding, however many columns it is of, up to MOST_COLUMNS. Arguments are those of `tiles`.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from hetero_cpu_kernels.experts.activations import TILE, TILE_BYTES, Layout
from hetero_cpu_kernels.experts.digit_tiles import BLOCK_BYTES
from hetero_cpu_kernels.experts.emitter import I8, I64, LINE_BYTES, Emitter
from hetero_cpu_kernels.experts.form import Matrix
from hetero_cpu_kernels.experts.integer_rows import integer_rows_of
from hetero_cpu_kernels.experts.rows import Rows
from hetero_cpu_kernels.experts.targets import Target
from hetero_cpu_kernels.experts.tile_weights import MOST_GROUPS, ByteWeights
from hetero_cpu_kernels.experts.tiles import Tiles

MOST_COLUMNS = (1 << 17) - 1
"""A product is 2^14 at most, and a sum has 31 bits."""
_DIGITS = 2


def multiplies_byte_tiles(matrix: Matrix, target: Target) -> bool:
    """Whether a matrix is multiplied in these tiles: of int8, a scale a row, in whole tiles."""
    is_whole = matrix.rows % (MOST_GROUPS * TILE) == 0 and matrix.cols <= MOST_COLUMNS
    is_known = matrix.encoding == "int8" and integer_rows_of(matrix, target) is not None
    return target.many == "tiles" and is_known and is_whole


def write_byte_tiles(module: ir.Module, name: str, *, rows: Rows, layout: Layout) -> None:
    """Add the function `name` for `rows` of int8. `layout`: of the activations."""
    emit = Emitter(module, name, lanes=TILE)
    _ByteTiles(emit, ByteWeights(emit, rows, layout), layout).write(name)
    emit.finish()


class _ByteTiles(Tiles):
    """Where `Tiles` has two groups of tokens, one has two digits here."""

    def __init__(self, emit: Emitter, weights: ByteWeights, layout: Layout) -> None:
        super().__init__(emit, weights)
        self._multiply = self._tiles.multiply_bytes
        self._bytes = weights
        self._group_bytes = TILE * layout.row_bytes
        with emit.build.goto_entry_block():
            sums = emit.build.alloca(ir.ArrayType(I8, MOST_GROUPS * _DIGITS * TILE_BYTES))
            sums.align = LINE_BYTES
            self._sums = emit.build.ptrtoint(sums, I64)

    def _write_all_tokens(self) -> None:
        with self._emit.loop(0, self._token_groups) as turn:
            self._bytes.begin_pass(turn.index)
            self._write_tokens(turn.index, _DIGITS)

    def _tokens_at(self, token_group: Any, t: int, number: Any) -> Any:
        emit = self._emit
        block = emit.add(emit.mul(number, BLOCK_BYTES), LINE_BYTES + t * TILE_BYTES)
        return emit.add(self._scales_at(token_group), block)

    def _scales_at(self, token_group: Any) -> Any:
        return self._emit.add(self._x, self._emit.mul(token_group, self._group_bytes))

    def _store_square(self, row_group: Any, num_rows: int, token_group: Any, num_tokens: int) -> None:
        emit = self._emit
        for number in range(num_rows * num_tokens):
            self._tiles.store(number, emit.add(self._sums, number * TILE_BYTES))
        of_tokens = emit.load(emit.floats, self._scales_at(token_group))
        for r in range(num_rows):
            place = self._result_at(emit.add(row_group, r), token_group)
            with emit.loop(0, TILE) as row:
                line = emit.mul(row.index, LINE_BYTES)
                high_at = emit.add(emit.add(self._sums, _DIGITS * r * TILE_BYTES), line)
                of_row = self._bytes.factors.at(emit.add(row.index, r * TILE), I64(0))
                scales = emit.build.fmul(of_row, of_tokens)
                emit.store(emit.build.fmul(self._whole(high_at), scales), emit.add(place, line))

    def _whole(self, high_at: Any) -> Any:
        """256 · high + low of a line of sums."""
        emit = self._emit
        high, low = (
            emit.build.sitofp(emit.load(emit.words, emit.add(high_at, digit * TILE_BYTES)), emit.floats)
            for digit in range(_DIGITS)
        )
        return emit.fma(high, ir.Constant(emit.floats, [256.0] * TILE), low)
