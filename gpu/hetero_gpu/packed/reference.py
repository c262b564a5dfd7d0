"""Packing and unpacking, the obvious way: what `pack` and `decode` are held to. `layout` has the format."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from hetero_gpu.packed.layout import CHUNK_ELEMENTS, ESCAPE, WINDOW, PackedLayout

Bytes = npt.NDArray[np.uint8]
Elements = npt.NDArray[np.uint16]

_NIBBLES = np.array([0, 4, 8, 12], dtype=np.uint32)


def pack_reference(plain: Bytes, layout: PackedLayout) -> Bytes | None:
    """`plain`: uint8 `[plain_bytes]`. Returns uint8 `[packed_bytes]`; None when it has too many escapes."""
    elements = plain.view(np.uint16)
    table = np.zeros(layout.num_chunks + 1, dtype=np.uint32)
    codes: list[npt.NDArray[np.uint32]] = []
    escapes: list[npt.NDArray[np.uint32]] = []
    for c, part in enumerate(_chunks(layout)):
        chunk = elements[part]
        base = _best_base(chunk)
        code = _codes(chunk, base)
        table[c] = sum(map(len, escapes)) << 8 | base
        index = np.flatnonzero(code == ESCAPE).astype(np.uint32)
        escapes.append(np.bitwise_or(index << 16, chunk[index], dtype=np.uint32))
        codes.append(_join(code))
    listed = np.concatenate(escapes)
    if len(listed) > layout.capacity:
        return None
    table[-1] = len(listed) << 8
    packed = np.zeros(layout.packed_bytes, dtype=np.uint8)
    packed[: layout.codes_at] = (elements >> 8 & 0x80) | (elements & 0x7F)
    packed[layout.codes_at : layout.table_at] = np.concatenate(codes).view(np.uint8)
    packed[layout.table_at : layout.table_at + table.nbytes] = table.view(np.uint8)
    packed[layout.escapes_at : layout.escapes_at + listed.nbytes] = listed.view(np.uint8)
    return packed


def unpack_reference(packed: Bytes, layout: PackedLayout) -> Bytes:
    """The record whose packed form is `packed`: uint8 `[plain_bytes]`."""
    mantissas = packed[: layout.codes_at].astype(np.uint16)
    codes = packed[layout.codes_at : layout.table_at].view(np.uint32)
    table = packed[layout.table_at : layout.escapes_at].view(np.uint32)
    escapes = packed[layout.escapes_at :].view(np.uint32)
    elements = np.empty(layout.num_elements, dtype=np.uint16)
    for c, part in enumerate(_chunks(layout)):
        base, first, end = int(table[c] & 0xFF), table[c] >> 8, table[c + 1] >> 8
        code = _split(codes[part.start // 8 : part.stop // 8])
        exponent = np.where(code == 0, 0, base + code)
        mantissa = mantissas[part]
        elements[part] = (mantissa & 0x80) << 8 | exponent << 7 | (mantissa & 0x7F)
        for escape in escapes[first:end]:
            elements[part.start + int(escape >> 16)] = escape & 0xFFFF
    return elements.view(np.uint8)


def _chunks(layout: PackedLayout) -> Iterator[slice]:
    for start in range(0, layout.num_elements, CHUNK_ELEMENTS):
        yield slice(start, min(start + CHUNK_ELEMENTS, layout.num_elements))


def _exponents(elements: Elements) -> Elements:
    return (elements >> 7 & 0xFF).astype(np.uint16)


def _best_base(chunk: Elements) -> int:
    """The base whose window holds most elements; the least of several."""
    counts = np.bincount(_exponents(chunk), minlength=256)
    return int(np.argmax(np.convolve(counts[1:], np.ones(WINDOW, dtype=np.int64), mode="valid")))


def _codes(chunk: Elements, base: int) -> Elements:
    exponent = _exponents(chunk)
    is_in_window = (exponent > base) & (exponent <= base + WINDOW)
    codes: Elements = np.where(is_in_window, exponent - base, ESCAPE).astype(np.uint16)
    codes[exponent == 0] = 0
    return codes


def _join(code: Elements) -> npt.NDArray[np.uint32]:
    """Code words of one chunk from one code an element."""
    quads = (code.reshape(2, -1, 4).astype(np.uint32) << _NIBBLES).sum(axis=2, dtype=np.uint32)
    words: npt.NDArray[np.uint32] = quads[0] | quads[1] << 16
    return words


def _split(words: npt.NDArray[np.uint32]) -> Elements:
    """One code an element from the code words of one chunk."""
    quads = np.stack([words & 0xFFFF, words >> 16])  # [2, words]
    codes: Elements = (quads[:, :, None] >> _NIBBLES & 0xF).reshape(-1).astype(np.uint16)
    return codes
