"""Tiles of bfloat16 (AMX): 16 rows of weights times 16 tokens at once.

Weights are the first operand as they lie: a tile is 16 rows of 32 columns, a row's stride apart. Tokens are
the second: `activations` brings them into rows of pairs. Two tiles of weights meet two of tokens, so four
products share four loads:

    tile   0 1    results: rows 0-15 by tokens 0-15, 16-31     4 5   weights: rows 0-15, 16-31
           2 3    rows 16-31 by the same                       6 7   tokens 0-15, 16-31

    arguments   0 first row of weights   1 groups of 16 rows   2 activations   3 groups of 16 tokens
                4 result: float32 [token groups, row groups, 16 rows, 16 tokens]
                5 first row of the weights that are multiplied next
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from hetero_cpu_kernels.experts.activations import TILE
from hetero_cpu_kernels.experts.emitter import I8, I64, POINTER, Emitter

_TILE_BYTES = 1024
_ROW_BYTES = 64
_COLUMNS = 2 * TILE
_NUM_TILES = 8
_PREFIX = "llvm.x86."
"""Of the instructions; a machine without them can be given functions of another name."""


def write_tiles(module: ir.Module, name: str, *, columns: int, row_bytes: int) -> None:
    """Add the function `name` for rows of `columns` bfloat16, a multiple of 32, `row_bytes` apart."""
    assert columns % _COLUMNS == 0, f"tiles of {columns} columns: not a multiple of {_COLUMNS}"
    emit = Emitter(module, name, lanes=TILE)
    _Tiles(emit, columns, row_bytes).write(_configuration(module, name))
    emit.finish()


def _configuration(module: ir.Module, name: str) -> Any:
    """Palette 1, all tiles 16 rows of 64 bytes."""
    content = bytearray(64)
    content[0] = 1
    for tile in range(_NUM_TILES):
        content[16 + 2 * tile] = _ROW_BYTES
        content[48 + tile] = TILE
    kind = ir.ArrayType(I8, len(content))
    constant = ir.GlobalVariable(module, kind, f"{name}_configuration")
    constant.initializer = ir.Constant(kind, content)
    constant.global_constant = True
    return constant


class _Tiles:
    def __init__(self, emit: Emitter, columns: int, row_bytes: int) -> None:
        self._emit, self._columns, self._row_bytes = emit, columns, row_bytes
        self._weights, self._row_groups, self._x, self._token_groups, self._y = map(emit.argument, range(5))
        self._next_weights = emit.argument(5)

    def write(self, configuration: Any) -> None:
        emit = self._emit
        emit.call(f"{_PREFIX}ldtilecfg", ir.VoidType(), [configuration])
        self._in_twos(self._token_groups, self._write_tokens)
        emit.call(f"{_PREFIX}tilerelease", ir.VoidType(), [])

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
        emit = self._emit
        rows = [
            emit.add(self._weights, emit.mul(emit.add(row_group, r), TILE * self._row_bytes))
            for r in range(num_rows)
        ]
        group_bytes = self._columns * _ROW_BYTES // 2
        tokens = [
            emit.add(self._x, emit.mul(emit.add(token_group, t), group_bytes)) for t in range(num_tokens)
        ]
        squares = [(r, t) for r in range(num_rows) for t in range(num_tokens)]
        for r, t in squares:
            self._tile("tilezero", 2 * r + t)
        with emit.loop(0, self._columns, step=_COLUMNS) as turn:
            with emit.build.if_then(emit.build.icmp_signed("==", token_group, I64(0))):
                self._prefetch_rows(row_group, num_rows, turn.index)
            for r, row in enumerate(rows):
                place = emit.add(row, emit.mul(turn.index, 2))
                self._tile("tileloadd64", 4 + r, place, self._row_bytes)
            for t, token in enumerate(tokens):
                place = emit.add(token, emit.mul(turn.index, _ROW_BYTES // 2))
                self._tile("tileloadd64", 6 + t, place, _ROW_BYTES)
            for r, t in squares:
                self._multiply(2 * r + t, 4 + r, 6 + t)
        for r, t in squares:
            group = emit.add(emit.mul(emit.add(token_group, t), self._row_groups), emit.add(row_group, r))
            self._tile("tilestored64", 2 * r + t, emit.add(self._y, emit.mul(group, _TILE_BYTES)), _ROW_BYTES)

    def _prefetch_rows(self, row_group: Any, num_rows: int, column: Any) -> None:
        """Ask for the same tiles of the next weights, which are used when these are done."""
        emit = self._emit
        first = emit.add(self._next_weights, emit.mul(row_group, TILE * self._row_bytes))
        place = emit.add(first, emit.mul(column, 2))
        for row in range(num_rows * TILE):
            emit.prefetch(emit.add(place, row * self._row_bytes), level=2)

    def _tile(self, name: str, tile: int, address: Any = None, stride: int = 0) -> None:
        emit = self._emit
        memory = [] if address is None else [emit.build.inttoptr(address, POINTER), I64(stride)]
        emit.call(f"{_PREFIX}{name}", ir.VoidType(), [I8(tile), *memory])

    def _multiply(self, result: int, weights: int, tokens: int) -> None:
        arguments = [I8(result), I8(weights), I8(tokens)]
        self._emit.call(f"{_PREFIX}tdpbf16ps", ir.VoidType(), arguments)
