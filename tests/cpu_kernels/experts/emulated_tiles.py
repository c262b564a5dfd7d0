"""AMX in numpy: what a machine without tiles calls instead of its instructions, slowly."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import llvmlite.binding as llvm
import numpy as np

PREFIX = "emulated_"


class _Registers(threading.local):
    """Of one thread: eight tiles of 16 rows of words."""

    def __init__(self) -> None:
        self.tiles = np.zeros((8, 16, 16), dtype=np.uint32)


_registers = _Registers()
_BYTE, _LONG, _ADDRESS = ctypes.c_int8, ctypes.c_int64, ctypes.c_void_p


def _rows(address: int, stride: int) -> Any:
    """16 rows of 64 bytes, `stride` bytes apart, as 32-bit words."""
    memory = (ctypes.c_uint8 * (15 * stride + 64)).from_address(address)
    octets = np.frombuffer(memory, dtype=np.uint8)
    return np.lib.stride_tricks.as_strided(octets, (16, 64), (stride, 1))


def _load(tile: int, address: int, stride: int) -> None:
    _registers.tiles[tile] = np.ascontiguousarray(_rows(address, stride)).view(np.uint32)


def _store(tile: int, address: int, stride: int) -> None:
    for row in range(16):
        ctypes.memmove(address + row * stride, _registers.tiles[tile, row].ctypes.data, 64)


def _multiply(result: int, first: int, second: int) -> None:
    """result[m, n] += sum over k of first[m, 2k + i] * second[k, 2n + i]."""
    total = _registers.tiles[result].view(np.float32)
    for shift in (16, 0):
        a = ((_registers.tiles[first] << shift) & 0xFFFF0000).astype(np.uint32).view(np.float32)
        b = ((_registers.tiles[second] << shift) & 0xFFFF0000).astype(np.uint32).view(np.float32)
        total += a @ b


def _multiply_bytes(result: int, first: int, second: int) -> None:
    """result[m, n] += sum over k of first[m, 4k + i] * second[k, 4n + i], signed bytes."""
    total = _registers.tiles[result].view(np.int32)
    a = _registers.tiles[first].view(np.int8).astype(np.int32)
    b = _registers.tiles[second].view(np.int8).reshape(16, 16, 4).transpose(0, 2, 1).reshape(64, 16)
    total += a @ b.astype(np.int32)


def _configure(address: int) -> None:
    content = bytes((ctypes.c_uint8 * 64).from_address(address))
    assert content[0] == 1
    assert all(content[16 + 2 * tile] == 64 and content[48 + tile] == 16 for tile in range(8))


_FUNCTIONS = {
    "ldtilecfg": ctypes.CFUNCTYPE(None, _ADDRESS)(_configure),
    "tilerelease": ctypes.CFUNCTYPE(None)(lambda: None),
    "tilezero": ctypes.CFUNCTYPE(None, _BYTE)(lambda tile: _registers.tiles[tile].fill(0)),
    "tileloadd64": ctypes.CFUNCTYPE(None, _BYTE, _ADDRESS, _LONG)(_load),
    "tilestored64": ctypes.CFUNCTYPE(None, _BYTE, _ADDRESS, _LONG)(_store),
    "tdpbf16ps": ctypes.CFUNCTYPE(None, _BYTE, _BYTE, _BYTE)(_multiply),
    "tdpbssd": ctypes.CFUNCTYPE(None, _BYTE, _BYTE, _BYTE)(_multiply_bytes),
}


def install() -> None:
    """Make the functions known to compiled code, as PREFIX and the instruction's name."""
    for name, function in _FUNCTIONS.items():
        address = ctypes.cast(function, ctypes.c_void_p).value
        llvm.add_symbol(PREFIX + name, address)
