"""Rows of a matrix as the kernels walk them: where a block lies, its vectors, its scale.

`PlainRows` finds a row by its number; `PackedRows` by the number of its first element in a record that was
packed as a whole; `PairRows` leaves bfloat16 undecoded, for instructions that multiply pairs of it. All are
told the address of a record when the kernel runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from llvmlite import ir

from hetero_cpu_kernels.experts.emitter import I8, I32, I64, LINE_BYTES, Emitter
from hetero_cpu_kernels.experts.encodings import DECODERS, Decoder, load_scale
from hetero_cpu_kernels.experts.form import BITS, ExpertForm, Matrix
from hetero_cpu_kernels.experts.packing import BLOCK_ELEMENTS, CHUNK_ELEMENTS, Packing
from hetero_cpu_kernels.experts.targets import Target

_CODES = 16
BYTES_AHEAD = 3072
"""What memory delivers to one core while a line is on its way."""


class Walk(Protocol):
    """What every kernel asks of a matrix. `place` is what `begin` returned for a row."""

    @property
    def matrix(self) -> Matrix:
        """What the rows are of."""

    def order(self, lanes: int) -> npt.NDArray[np.int64]:
        """`[vectors, elements of a vector]`: which column of a block each one holds."""

    def begin(self, emit: Emitter, record: Any, row: Any) -> Any:
        """The place of a row of the record at an address."""

    def vectors(self, emit: Emitter, place: Any, column: Any) -> list[Any]:
        """The block that starts at a column; its values lack `factor`."""

    def prefetch(self, emit: Emitter, place: Any, column: Any) -> None:
        """Ask for the cache lines of a block; columns behind a row's end are those of the next."""

    @property
    def factor(self) -> float:
        """What all values must be multiplied with."""

    @property
    def line_columns(self) -> int:
        """Columns of a cache line."""

    @property
    def bytes_ahead(self) -> int:
        """How far ahead cache lines are asked for, at least, in bytes of whole rows."""


class Rows(Walk, Protocol):
    """What the kernels of floats ask besides."""

    def tail(self, emit: Emitter, place: Any, column: int) -> list[Any]:
        """The last block of a row, where it is shorter: zero behind the end."""

    @property
    def is_in_pairs(self) -> bool:
        """Whether vectors are of pairs of bfloat16, as activations then are too. Else all are of float32."""

    def side_by_side(self, target: Target) -> int:
        """Rows that a kernel of several tokens reads at once."""


def rows_of(form: ExpertForm, matrix: Matrix) -> Rows:
    """The rows of one of a form's matrices. Raises ValueError where packed rows are not whole blocks."""
    if form.packed_elements:
        return PackedRows(matrix, Packing(form.packed_elements))
    return PlainRows(matrix, DECODERS[matrix.encoding])


@dataclass(frozen=True)
class PlainRows:
    """Rows one after another; a place is an address."""

    matrix: Matrix
    decoder: Decoder
    is_in_pairs = False
    bytes_ahead = BYTES_AHEAD

    @property
    def factor(self) -> float:
        return self.decoder.factor

    @property
    def line_columns(self) -> int:
        return 8 * LINE_BYTES // BITS[self.matrix.encoding]

    def side_by_side(self, target: Target) -> int:
        return target.rows

    def order(self, lanes: int) -> npt.NDArray[np.int64]:
        return self.decoder.columns(lanes)

    def begin(self, emit: Emitter, record: Any, row: Any) -> Any:
        return emit.add(emit.add(record, self.matrix.offset), emit.mul(row, self.matrix.row_bytes))

    def vectors(self, emit: Emitter, place: Any, column: Any) -> list[Any]:
        return self.decoder.decode(emit, emit.add(place, self._bytes(emit, column)))

    def tail(self, emit: Emitter, place: Any, column: int) -> list[Any]:
        """Through a copy: a load of a whole block might leave the memory that the bank has."""
        block = self.order(emit.lanes).size * BITS[self.matrix.encoding] // 8
        with emit.build.goto_entry_block():
            copy = emit.build.alloca(ir.ArrayType(I8, block))
        emit.build.store(ir.Constant(ir.ArrayType(I8, block), bytearray(block)), copy)
        start = emit.build.ptrtoint(copy, I64)
        begin = column * BITS[self.matrix.encoding] // 8
        for i in range(self.matrix.row_bytes - begin):
            emit.store(emit.load(I8, emit.add(place, begin + i)), emit.add(start, i))
        return self.decoder.decode(emit, start)

    def prefetch(self, emit: Emitter, place: Any, column: Any) -> None:
        block = self.order(emit.lanes).size * BITS[self.matrix.encoding] // 8
        address = emit.add(place, self._bytes(emit, column))
        for line in range(0, block, LINE_BYTES):
            emit.prefetch(emit.add(address, line))

    def _bytes(self, emit: Emitter, column: Any) -> Any:
        bits = BITS[self.matrix.encoding]
        if bits == 4:
            return emit.build.lshr(emit.add(column, 0), I64(1))
        return emit.mul(column, bits // 8)


@dataclass(frozen=True)
class PackedPlace:
    """The record's address, and the number of the row's first element."""

    record: Any
    element: Any


@dataclass(frozen=True)
class PackedRows:
    """Rows of a packed bf16 record (`packing`)."""

    matrix: Matrix
    packing: Packing
    factor = 1.0
    is_in_pairs = False
    bytes_ahead = 4 * BYTES_AHEAD  # measured: two streams, each of fewer bytes than the plain row
    line_columns = LINE_BYTES
    """Of mantissas, and of codes where they are read for the first time."""

    def __post_init__(self) -> None:
        if self.matrix.encoding != "bfloat16":
            raise ValueError(f"packed records are bfloat16, not {self.matrix.encoding}")
        if self.matrix.cols % BLOCK_ELEMENTS or self.matrix.offset % (2 * BLOCK_ELEMENTS):
            raise ValueError(
                f"a packed matrix of {self.matrix.cols} columns at byte {self.matrix.offset}: columns must "
                f"be a multiple of {BLOCK_ELEMENTS}, the offset of {2 * BLOCK_ELEMENTS}"
            )

    def side_by_side(self, target: Target) -> int:
        return min(2, target.rows)  # each row keeps a table of exponents in a register

    def order(self, lanes: int) -> npt.NDArray[np.int64]:
        return np.arange(4 * lanes).reshape(lanes, 4).T

    def begin(self, emit: Emitter, record: Any, row: Any) -> PackedPlace:
        return PackedPlace(record, emit.add(emit.mul(row, self.matrix.cols), self.matrix.offset // 2))

    def vectors(self, emit: Emitter, place: PackedPlace, column: Any) -> list[Any]:
        build = emit.build
        element = emit.add(place.element, column)
        chunk, codes_at, shift = self._locate(emit, element)
        mantissas = emit.load(emit.words, emit.add(place.record, element))
        codes = emit.load(emit.words, emit.add(place.record, codes_at))
        codes = build.lshr(codes, emit.splat(shift))
        table = emit.add(emit.add(place.record, self.packing.table_at), emit.mul(chunk, 4))
        base = emit.splat(build.shl(build.and_(emit.load(I32, table), I32(0xFF)), I32(23)))
        exponents = _exponent_table(emit, base) if emit.lanes == _CODES else None
        vectors = []
        for part in range(4):
            # The element's byte of sign and mantissa at the top; the sign fills what will be exponent.
            top = build.shl(mantissas, emit.word(24 - 8 * part))
            bits = build.and_(build.ashr(top, emit.word(8)), emit.word(0x807F0000))
            code = build.lshr(codes, emit.word(4 * part))
            if exponents is not None:
                vectors.append(emit.as_floats(build.or_(bits, emit.permute(exponents, code))))
            else:
                vectors.append(emit.as_floats(_with_exponent(emit, bits, code, base)))
        return vectors

    def tail(self, emit: Emitter, place: PackedPlace, column: int) -> list[Any]:
        raise AssertionError("packed rows are whole blocks: they have no tail")

    def prefetch(self, emit: Emitter, place: PackedPlace, column: Any) -> None:
        element = emit.add(place.element, column)
        _, codes_at, _ = self._locate(emit, element)
        emit.prefetch(emit.add(place.record, element))
        emit.prefetch(emit.add(place.record, codes_at))

    def _locate(self, emit: Emitter, element: Any) -> tuple[Any, Any, Any]:
        """An element's chunk, the offset of its code word, and by how much its half of it is shifted."""
        build = emit.build
        chunk = build.lshr(element, I64(CHUNK_ELEMENTS.bit_length() - 1))
        index = build.and_(element, I64(CHUNK_ELEMENTS - 1))
        is_last = build.icmp_unsigned("==", chunk, I64(self.packing.num_chunks - 1))
        half = build.select(is_last, I64(self.packing.last_half), I64(CHUNK_ELEMENTS // 2))
        is_second = build.icmp_unsigned(">=", index, half)
        word = build.select(is_second, build.sub(index, half), index)  # four elements, four bytes
        codes_at = emit.add(emit.add(word, emit.mul(chunk, CHUNK_ELEMENTS // 2)), self.packing.codes_at)
        return chunk, codes_at, build.select(is_second, I32(16), I32(0))


def _exponent_table(emit: Emitter, base: Any) -> Any:
    """The exponent of each code; none for zero and for an escape, which then is a denormal at most."""
    build = emit.build
    steps = ir.Constant(emit.words, [code << 23 for code in range(_CODES)])
    held = ir.Constant(emit.words, [0, *[0xFFFFFFFF] * (_CODES - 2), 0])
    return build.and_(build.add(base, steps), held)


def _with_exponent(emit: Emitter, bits: Any, codes: Any, base: Any) -> Any:
    """The same without a table: sign and mantissa with the exponent of the lowest code of each word."""
    build = emit.build
    code = build.and_(codes, emit.word(_CODES - 1))
    rank = build.and_(build.add(code, emit.word(1)), emit.word(_CODES - 1))  # 1 for zero, 0 for an escape
    exponent = build.add(build.shl(code, emit.word(23)), base)
    is_held = build.icmp_unsigned(">", rank, emit.word(1))
    return build.select(is_held, build.or_(bits, exponent), emit.word(0))


def load_row_scale(emit: Emitter, rows: Walk, *, record: Any, row: Any) -> Any:
    """The address of the first scale of a row."""
    matrix = rows.matrix
    scales = matrix.scales
    assert scales is not None, f"a matrix of {matrix.encoding} has no scales"
    parts, row_blocks, col_blocks = matrix.scale_shape
    build = emit.build
    rows_a_part = I64(matrix.rows // parts)
    part, within = build.udiv(row, rows_a_part), build.urem(row, rows_a_part)
    block = emit.add(emit.mul(part, row_blocks), build.udiv(within, I64(scales.block_rows)))
    offset = emit.mul(block, col_blocks * BITS[scales.encoding] // 8)
    return emit.add(emit.add(record, scales.offset), offset)


def load_block_scale(emit: Emitter, rows: Walk, *, scale_row: Any, block: Any) -> Any:
    """The scale of column block number `block`, in all lanes."""
    scales = rows.matrix.scales
    assert scales is not None, f"a matrix of {rows.matrix.encoding} has no scales"
    address = emit.add(scale_row, emit.mul(block, BITS[scales.encoding] // 8))
    return load_scale(emit, scales.encoding, address)


@dataclass(frozen=True)
class PairRows:
    """Rows of bfloat16, whole blocks of two a lane."""

    matrix: Matrix
    factor = 1.0
    is_in_pairs = True
    bytes_ahead = BYTES_AHEAD

    @property
    def line_columns(self) -> int:
        return 8 * LINE_BYTES // BITS[self.matrix.encoding]

    def side_by_side(self, target: Target) -> int:
        return target.rows

    def order(self, lanes: int) -> npt.NDArray[np.int64]:
        return np.arange(2 * lanes).reshape(1, -1)

    def begin(self, emit: Emitter, record: Any, row: Any) -> Any:
        return emit.add(emit.add(record, self.matrix.offset), emit.mul(row, self.matrix.row_bytes))

    def vectors(self, emit: Emitter, place: Any, column: Any) -> list[Any]:
        return [emit.load(emit.words, emit.add(place, emit.mul(column, 2)))]

    def tail(self, emit: Emitter, place: Any, column: int) -> list[Any]:
        raise AssertionError("rows of pairs are whole blocks: they have no tail")

    def prefetch(self, emit: Emitter, place: Any, column: Any) -> None:
        emit.prefetch(emit.add(place, emit.mul(column, 2)))
