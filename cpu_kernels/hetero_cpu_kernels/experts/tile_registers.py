"""The eight tile registers of AMX, all 16 rows of 64 bytes: what is loaded, multiplied and stored."""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from hetero_cpu_kernels.experts.activations import TILE, TILE_BYTES
from hetero_cpu_kernels.experts.emitter import I8, I64, POINTER, Emitter

ROW_BYTES = TILE_BYTES // TILE
_NUM_TILES = 8
_PREFIX = "llvm.x86."
"""Of the instructions; a machine without them can be given functions of another name."""


class TileRegisters:
    """Writes tile instructions. Registers have numbers, and are ready between `configure` and `release`."""

    def __init__(self, emit: Emitter) -> None:
        self._emit = emit

    def configure(self, name: str) -> None:
        """`name`: of the module's constant, its own in the module."""
        content = bytearray(64)
        content[0] = 1  # palette
        for tile in range(_NUM_TILES):
            content[16 + 2 * tile] = ROW_BYTES
            content[48 + tile] = TILE
        kind = ir.ArrayType(I8, len(content))
        constant = ir.GlobalVariable(self._emit.module, kind, name)
        constant.initializer = ir.Constant(kind, content)
        constant.global_constant = True
        self._call("ldtilecfg", constant)

    def release(self) -> None:
        self._call("tilerelease")

    def zero(self, tile: int) -> None:
        self._call("tilezero", I8(tile))

    def load(self, tile: int, address: Any, *, stride: int = ROW_BYTES) -> None:
        """`stride`: bytes from one row in memory to the next."""
        self._call("tileloadd64", I8(tile), self._emit.build.inttoptr(address, POINTER), I64(stride))

    def store(self, tile: int, address: Any) -> None:
        """Rows one after another."""
        self._call("tilestored64", I8(tile), self._emit.build.inttoptr(address, POINTER), I64(ROW_BYTES))

    def multiply(self, result: int, *, weights: int, tokens: int) -> None:
        """Add the products of pairs of bfloat16: result[m, n] += weights[m, 2k + i] * tokens[k, 2n + i]."""
        self._call("tdpbf16ps", I8(result), I8(weights), I8(tokens))

    def multiply_bytes(self, result: int, *, weights: int, tokens: int) -> None:
        """Add the products of four signed bytes: result[m, n] += weights[m, 4k + i] * tokens[k, 4n + i]."""
        self._call("tdpbssd", I8(result), I8(weights), I8(tokens))

    def _call(self, name: str, *arguments: Any) -> None:
        self._emit.call(f"{_PREFIX}{name}", ir.VoidType(), arguments)
