"""Packing on the host's cores: compiled, without the GIL, so that threads pack records side by side.

Two passes. `measure` reads a record and finds the bases of its chunks and the number of its escapes: it
changes nothing, so a whole bank can be judged before any of it is overwritten. `encode` writes the packed
record. Both stay in the first-level cache: a chunk is 32 KiB.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from hetero_gpu.packed.layout import CHUNK_ELEMENTS, ESCAPE, WINDOW, PackedLayout
from hetero_gpu.packed.reference import Bytes

Table = npt.NDArray[np.uint32]


def _njit(function: Any) -> Any:
    return numba.njit(nogil=True, boundscheck=False)(function)


def measure(plain: Bytes, table: Table) -> int:
    """Fill `table` (uint32 `[num_chunks + 1]`) for the record `plain` (uint8 `[plain_bytes]`).

    Returns its number of escapes: the record fits when that is within the layout's capacity.
    """
    return int(_measure(plain.view(np.uint64), table))


def encode(plain: Bytes, packed: Bytes, *, table: Table, layout: PackedLayout) -> None:
    """Write the packed form of `plain` to `packed` (uint8 `[packed_bytes]`; the two do not overlap).

    `table`: what `measure` made of `plain`, which fits.
    """
    packed[layout.table_at : layout.escapes_at] = 0
    packed[layout.table_at : layout.table_at + table.nbytes] = table.view(np.uint8)
    _encode(
        plain.view(np.uint64),
        table,
        packed[: layout.codes_at].view(np.uint32),
        packed[layout.codes_at : layout.table_at].view(np.uint32),
        packed[layout.escapes_at :].view(np.uint32),
    )


@_njit
def _measure(quads: Any, table: Any) -> Any:
    """`quads`: four elements each, uint64."""
    num_escapes = 0
    counts = np.empty((4, 256), np.int64)  # four, so that equal neighbours do not wait for each other
    chunk_quads = CHUNK_ELEMENTS // 4
    for c in range(table.size - 1):
        counts[:] = 0
        start = c * chunk_quads
        size = min(chunk_quads, quads.size - start)
        for i in range(start, start + size):
            quad = quads[i]
            counts[0, (quad >> np.uint64(7)) & np.uint64(0xFF)] += 1
            counts[1, (quad >> np.uint64(23)) & np.uint64(0xFF)] += 1
            counts[2, (quad >> np.uint64(39)) & np.uint64(0xFF)] += 1
            counts[3, (quad >> np.uint64(55)) & np.uint64(0xFF)] += 1
        base, num_held = _best_base(counts)
        table[c] = num_escapes << 8 | base
        num_escapes += 4 * size - num_held
    table[table.size - 1] = num_escapes << 8
    return num_escapes


@_njit
def _best_base(counts: Any) -> Any:
    """The base whose window holds most elements, and how many have a code with it."""
    total = counts.sum(axis=0)
    held = total[1 : 1 + WINDOW].sum()
    best, most = 0, held
    for base in range(1, 256 - WINDOW):
        held += total[base + WINDOW] - total[base]
        if held > most:
            best, most = base, held
    return best, most + total[0]


@_njit
def _encode(quads: Any, table: Any, mantissas: Any, codes: Any, escapes: Any) -> Any:
    """`quads`: four elements each, uint64; the parts as 32-bit words."""
    code_of = np.empty(256, np.uint32)
    chunk_codes = np.empty(CHUNK_ELEMENTS // 4, np.uint32)
    chunk_quads = CHUNK_ELEMENTS // 4
    for c in range(table.size - 1):
        _fill_codes(code_of, np.int64(table[c] & 0xFF))
        escape = np.int64(table[c] >> 8)
        start = c * chunk_quads
        size = min(chunk_quads, quads.size - start)
        for i in range(size):
            quad = quads[start + i]
            code = _code_quad(quad, code_of)
            chunk_codes[i] = code
            mantissas[start + i] = _mantissa_quad(quad)
            if _has_escape(code):
                escape = _list_escapes(quad, code, i, escapes, escape)
        half = size // 2
        for i in range(half):
            codes[start // 2 + i] = chunk_codes[i] | chunk_codes[half + i] << np.uint32(16)


@_njit
def _list_escapes(quad: Any, code: Any, i: Any, escapes: Any, escape: Any) -> Any:
    """Write the escapes of quad `i` of a chunk at `escape`; where the next one goes."""
    for lane in range(4):
        if (np.int64(code) >> (4 * lane)) & 0xF == ESCAPE:
            element = np.int64((quad >> np.uint64(16 * lane)) & np.uint64(0xFFFF))
            escapes[escape] = (4 * i + lane) << 16 | element
            escape += 1
    return escape


@_njit
def _fill_codes(code_of: Any, base: Any) -> Any:
    """The code of each exponent."""
    code_of[:] = ESCAPE
    for code in range(1, WINDOW + 1):
        code_of[base + code] = code
    code_of[0] = 0


@_njit
def _code_quad(quad: Any, code_of: Any) -> Any:
    """Codes of four elements, four bits each."""
    return (
        code_of[(quad >> np.uint64(7)) & np.uint64(0xFF)]
        | code_of[(quad >> np.uint64(23)) & np.uint64(0xFF)] << np.uint32(4)
        | code_of[(quad >> np.uint64(39)) & np.uint64(0xFF)] << np.uint32(8)
        | code_of[(quad >> np.uint64(55)) & np.uint64(0xFF)] << np.uint32(12)
    )


@_njit
def _mantissa_quad(quad: Any) -> Any:
    """Sign and mantissa of four elements, a byte each."""
    spread = ((quad >> np.uint64(8)) & np.uint64(0x0080008000800080)) | (quad & np.uint64(0x007F007F007F007F))
    pairs = (spread | spread >> np.uint64(8)) & np.uint64(0x0000FFFF0000FFFF)
    return (pairs | pairs >> np.uint64(16)) & np.uint64(0xFFFFFFFF)


@_njit
def _has_escape(codes: Any) -> Any:
    """Whether any of four codes has all its bits set."""
    pairs = codes & (codes >> np.uint32(1))
    return (pairs & (pairs >> np.uint32(2)) & np.uint32(0x1111)) != 0
