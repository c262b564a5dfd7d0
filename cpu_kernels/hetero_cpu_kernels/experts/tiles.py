"""Tiles of bfloat16 (AMX): 16 rows of weights times 16 tokens at once.

Weights are the first operand, tile after tile as `panel` leaves them. Tokens are the second: `activations`
brings them into rows of pairs. Two tiles of weights meet two of tokens, so four products share four loads:

    tile   0 1    results: rows 0-15 by tokens 0-15, 16-31     4 5   weights: rows 0-15, 16-31
           2 3    rows 16-31 by the same                       6 7   tokens 0-15, 16-31

    arguments   0 panel   1 groups of 16 rows   2 activations   3 groups of 16 tokens
                4 result: float32 [token groups, ..., row groups, 16 rows, 16 tokens]
                5 bytes from the results of 16 tokens to the next   6 what the next panel is made of

While tiles are multiplied a core would ask memory for nothing: a part of what the next panel is made of is
asked for meanwhile, as much as memory may bring in that time.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from hetero_cpu_kernels.experts.activations import PANEL_TILE_BYTES, TILE, TILE_BYTES, TILE_COLUMNS
from hetero_cpu_kernels.experts.emitter import I8, I64, LINE_BYTES, POINTER, Emitter

_ROW_BYTES = TILE_BYTES // TILE
_MOST_LINES = 8
"""Cache lines that are asked for while two tiles of weights are multiplied: some 150 cycles."""
_NUM_TILES = 8
_PREFIX = "llvm.x86."
"""Of the instructions; a machine without them can be given functions of another name."""


def write_tiles(module: ir.Module, name: str, *, columns: int, row_bytes: int) -> None:
    """Add the function `name` for rows of `columns` bfloat16, made of `row_bytes` of the record each."""
    assert columns % TILE_COLUMNS == 0, f"tiles of {columns} columns: not a multiple of {TILE_COLUMNS}"
    emit = Emitter(module, name, lanes=TILE)
    _Tiles(emit, columns // TILE_COLUMNS, row_bytes).write(_configuration(module, name))
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
    def __init__(self, emit: Emitter, steps: int, row_bytes: int) -> None:
        self._emit, self._steps = emit, steps
        lines = 2 * TILE * row_bytes // LINE_BYTES // steps
        self._ahead_bytes = LINE_BYTES * min(lines, _MOST_LINES)
        self._weights, self._row_groups, self._x, self._token_groups, self._y = map(emit.argument, range(5))
        self._y_stride, self._next = emit.argument(5), emit.argument(6)

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
        rows = self._groups(self._weights, row_group, num_rows, PANEL_TILE_BYTES)
        tokens = self._groups(self._x, token_group, num_tokens, TILE_BYTES)
        squares = [(r, t) for r in range(num_rows) for t in range(num_tokens)]
        for r, t in squares:
            self._tile("tilezero", 2 * r + t)
        with emit.loop(0, self._steps) as turn:
            with emit.build.if_then(emit.build.icmp_signed("==", token_group, I64(0))):
                self._prefetch(row_group, turn.index)
            for r, row in enumerate(rows):
                place = emit.add(row, emit.mul(turn.index, PANEL_TILE_BYTES))
                self._tile("tileloadd64", 4 + r, place, _ROW_BYTES)
            for t, token in enumerate(tokens):
                place = emit.add(token, emit.mul(turn.index, TILE_BYTES))
                self._tile("tileloadd64", 6 + t, place, _ROW_BYTES)
            for r, t in squares:
                self._multiply(2 * r + t, 4 + r, 6 + t)
        for r, t in squares:
            of_tokens = emit.add(self._y, emit.mul(emit.add(token_group, t), self._y_stride))
            place = emit.add(of_tokens, emit.mul(emit.add(row_group, r), TILE_BYTES))
            self._tile("tilestored64", 2 * r + t, place, _ROW_BYTES)

    def _groups(self, first: Any, number: Any, count: int, tile_bytes: int) -> list[Any]:
        """Addresses of the tiles of `count` groups from `number` on."""
        emit, size = self._emit, self._steps * tile_bytes
        return [emit.add(first, emit.mul(emit.add(number, i), size)) for i in range(count)]

    def _prefetch(self, row_group: Any, done: Any) -> None:
        """Ask for some lines of what comes next, behind those that were asked for in the steps before."""
        emit = self._emit
        steps = emit.add(emit.mul(emit.build.lshr(row_group, I64(1)), self._steps), done)
        place = emit.add(self._next, emit.mul(steps, self._ahead_bytes))
        for line in range(0, self._ahead_bytes, LINE_BYTES):
            emit.prefetch(emit.add(place, line), level=2)

    def _tile(self, name: str, tile: int, address: Any = None, stride: int = 0) -> None:
        emit = self._emit
        memory = [] if address is None else [emit.build.inttoptr(address, POINTER), I64(stride)]
        emit.call(f"{_PREFIX}{name}", ir.VoidType(), [I8(tile), *memory])

    def _multiply(self, result: int, weights: int, tokens: int) -> None:
        arguments = [I8(result), I8(weights), I8(tokens)]
        self._emit.call(f"{_PREFIX}tdpbf16ps", ir.VoidType(), arguments)
