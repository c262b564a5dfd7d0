"""Tiles of bfloat16 (AMX): 16 rows of weights times 16 tokens at once.

Weights are the first operand (`tile_weights` has where they come from), tokens the second: `activations`
brings them into rows of pairs. Two tiles of weights meet two of tokens, so four products share four loads:

    tile   0 1    results: rows 0-15 by tokens 0-15, 16-31     4 5   weights: rows 0-15, 16-31
           2 3    rows 16-31 by the same                       6 7   tokens 0-15, 16-31

    arguments   0 panel or record   1 groups of 16 rows   2 activations   3 groups of 16 tokens
                4 result: float32 [token groups, ..., row groups, 16 rows, 16 tokens]
                5 bytes from the results of 16 tokens to the next
                6 where the rows lie that come next   7 how many bytes of them
                8 first row of a record   9 memory for slots   10 record and 11 row that come next
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from hetero_cpu_kernels.experts.activations import TILE, TILE_BYTES, Layout
from hetero_cpu_kernels.experts.emitter import I64, Emitter
from hetero_cpu_kernels.experts.rows import Rows
from hetero_cpu_kernels.experts.tile_registers import TileRegisters
from hetero_cpu_kernels.experts.tile_weights import Weights


def write_tiles(module: ir.Module, name: str, *, weights: type[Weights], rows: Rows, layout: Layout) -> None:
    """Add the function `name` for `rows` as `weights` takes them. `layout`: of the activations."""
    emit = Emitter(module, name, lanes=TILE)
    Tiles(emit, weights(emit, rows, layout)).write(name)
    emit.finish()


class Tiles:
    """Writes the products. `byte_tiles` has those of other tiles, two of which are of the same tokens."""

    def __init__(self, emit: Emitter, weights: Weights) -> None:
        self._emit, self._weights, self._tiles = emit, weights, TileRegisters(emit)
        self._multiply = self._tiles.multiply
        self._steps = weights.turns * weights.steps
        self._row_groups, self._x, self._token_groups, self._y = map(emit.argument, range(1, 5))
        self._y_stride = emit.argument(5)

    def write(self, name: str) -> None:
        """The function's body."""
        self._tiles.configure(f"{name}_configuration")
        self._write_all_tokens()
        self._tiles.release()

    def _write_all_tokens(self) -> None:
        self._in_twos(self._token_groups, self._write_tokens)

    def _in_twos(self, count: Any, write: Any) -> None:
        """write(first, 2) for pairs of groups, write(last, 1) for an odd one."""
        emit = self._emit
        even = emit.build.and_(count, I64(-2))
        with emit.loop(0, even, step=2) as turn:
            write(turn.index, 2)
        with emit.loop(even, count) as turn:
            write(turn.index, 1)

    def _write_tokens(self, token_group: Any, num_tokens: int) -> None:
        self._in_twos(
            self._row_groups,
            lambda row_group, num_rows: self._write_square(row_group, num_rows, token_group, num_tokens),
        )

    def _write_square(self, row_group: Any, num_rows: int, token_group: Any, num_tokens: int) -> None:
        emit, weights = self._emit, self._weights
        for r in range(num_rows):
            for t in range(num_tokens):
                self._tiles.zero(2 * r + t)
        weights.begin(row_group, num_rows)
        with emit.loop(0, weights.turns - 1) as turn:
            weights.advance(emit.add(turn.index, 1))
            self._multiply_turn(turn.index, num_rows, token_group, num_tokens)
        self._multiply_turn(I64(weights.turns - 1), num_rows, token_group, num_tokens)
        self._store_square(row_group, num_rows, token_group, num_tokens)

    def _store_square(self, row_group: Any, num_rows: int, token_group: Any, num_tokens: int) -> None:
        for r in range(num_rows):
            for t in range(num_tokens):
                place = self._result_at(self._emit.add(row_group, r), self._emit.add(token_group, t))
                self._tiles.store(2 * r + t, place)

    def _result_at(self, row_group: Any, token_group: Any) -> Any:
        emit = self._emit
        of_tokens = emit.add(self._y, emit.mul(token_group, self._y_stride))
        return emit.add(of_tokens, emit.mul(row_group, TILE_BYTES))

    def _multiply_turn(self, turn: Any, num_rows: int, token_group: Any, num_tokens: int) -> None:
        emit, tiles = self._emit, self._tiles
        for step in range(self._weights.steps):
            for r in range(num_rows):
                place, stride = self._weights.tile(r, turn, step=step)
                tiles.load(4 + r, place, stride=stride)
            for t in range(num_tokens):
                number = emit.add(emit.mul(turn, self._weights.steps), step)
                tiles.load(6 + t, self._tokens_at(token_group, t, number))
            for r in range(num_rows):
                for t in range(num_tokens):
                    self._multiply(2 * r + t, weights=4 + r, tokens=6 + t)

    def _tokens_at(self, token_group: Any, t: int, number: Any) -> Any:
        """Address of the activations' tile of a group of tokens, in the order of columns."""
        emit = self._emit
        group = emit.mul(emit.add(token_group, t), self._steps)
        return emit.add(self._x, emit.mul(emit.add(group, number), TILE_BYTES))
