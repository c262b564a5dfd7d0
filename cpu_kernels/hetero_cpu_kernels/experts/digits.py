"""Activations with two signed bytes each, for instructions that multiply bytes.

    x  =  scale · (256 · high + low)      high, low: -128 .. 127; scale: the row's largest magnitude / 32639

No activation is off by more than 1/65278 of the largest of its row, far less than bfloat16 rounds. Products
are exact integers. They need unsigned weights, weight + offset (`integer_rows`), so each row of activations
also has what that adds: offset times sums of its digits.

    row      |float32 values |scale, 64 bytes |corrections of high, of low |block |block ...
             ^ 0              ^ digits_at
    block    one vector of weights       |high |low |                        corrections: of the whole row
             two, of halves of its bytes |high |high |low |low |correction|  of each block, 256 · high + low

A vector of digits has those of the columns that the same bytes of weights are of. Corrections have the lanes
of vectors of 32-bit words, and are negative already. `digit_tiles` has the same digits for products of signed
bytes, which need none.

    arguments   0 float32 [columns]   1 where the digits go
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from llvmlite import ir

from hetero_cpu_kernels.experts.emitter import F32, I8, I32, LINE_BYTES, Emitter
from hetero_cpu_kernels.experts.integer_rows import IntegerRows

_LARGEST = 127 * 256 + 127
_LEAST = 1e-30
"""Rows of smaller magnitudes are zeros: the inverse of their scale might be infinite."""


def larger_magnitudes(emit: Emitter, words: Any, before: Any) -> Any:
    """Of a vector of float32, as words, and of what was found before; infinite or no number where one is."""
    bits = emit.build.and_(words, emit.word(0x7FFFFFFF))  # of these, larger floats are larger integers
    return emit.build.select(emit.build.icmp_unsigned(">", bits, before), bits, before)


def scale_and_factor(emit: Emitter, largest: Any) -> tuple[Any, Any]:
    """A row's scale and what its values are multiplied with, of its largest magnitude; or vectors of them."""
    build = emit.build
    most, least, zero = (_numbers(largest.type, value) for value in (_LARGEST, _LEAST, 0.0))
    factor = build.select(build.fcmp_ordered("<", largest, least), zero, build.fdiv(most, largest))
    return build.fdiv(largest, most), factor


def whole_numbers(emit: Emitter, floats: Any, factors: Any) -> Any:
    """256 · high + low of a vector of float32."""
    count = floats.type.count
    scaled = emit.build.fmul(floats, factors)
    rounded = emit.call(f"llvm.rint.v{count}f32", floats.type, [scaled])
    return emit.as_integers(rounded)


def high_digits(emit: Emitter, whole: Any) -> Any:
    """Of whole numbers; the low digits are their lowest bytes."""
    eight, half = (_numbers(whole.type, number) for number in (8, 128))
    return emit.build.ashr(emit.build.add(whole, half), eight)


def digit_bytes(emit: Emitter, floats: Any, factor: Any) -> list[Any]:
    """High and low digits of a vector of float32 times a factor, a byte each."""
    build, count = emit.build, floats.type.count
    one = build.insert_element(ir.Constant(floats.type, ir.Undefined), factor, I32(0))
    factors = build.shuffle_vector(one, one, ir.Constant(ir.VectorType(I32, count), [0] * count))
    whole = whole_numbers(emit, floats, factors)
    return [build.trunc(part, ir.VectorType(I8, count)) for part in (high_digits(emit, whole), whole)]


def _numbers(kind: Any, value: float) -> Any:
    """A constant of a type, in all lanes of a vector."""
    return ir.Constant(kind, [value] * kind.count if isinstance(kind, ir.VectorType) else value)


@dataclass(frozen=True)
class DigitRow:
    """Where the parts of a row of digits lie, in bytes from its scale. `vectors`: of a block of weights."""

    columns: int
    lanes: int
    vectors: int

    @classmethod
    def of(cls, rows: IntegerRows, lanes: int) -> DigitRow:
        return cls(rows.matrix.cols, lanes, len(rows.order(lanes)))

    @property
    def vector_bytes(self) -> int:
        return 4 * self.lanes

    @property
    def block_columns(self) -> int:
        """Columns of a block."""
        return self.vectors * self.vector_bytes

    @property
    def has_block_corrections(self) -> bool:
        return self.vectors > 1

    @property
    def block_bytes(self) -> int:
        return (2 * self.vectors + self.has_block_corrections) * self.vector_bytes

    @property
    def blocks_at(self) -> int:
        return LINE_BYTES + 2 * self.vector_bytes

    @property
    def num_bytes(self) -> int:
        """All of it, whole cache lines."""
        end = self.blocks_at + self.columns // self.block_columns * self.block_bytes
        return -(-end // LINE_BYTES) * LINE_BYTES


def write_digits(module: ir.Module, name: str, *, rows: IntegerRows, lanes: int) -> None:
    """Add the function `name`, which writes one row of digits, to `module`."""
    emit = Emitter(module, name, lanes=lanes)
    _Digits(emit, rows).write()
    emit.finish()


class _Digits:
    def __init__(self, emit: Emitter, rows: IntegerRows) -> None:
        self._emit, self._rows = emit, rows
        self._row = DigitRow.of(rows, emit.lanes)
        self._source, self._out = emit.argument(0), emit.argument(1)

    def write(self) -> None:
        emit, row = self._emit, self._row
        largest = self._largest()
        scale, factor = scale_and_factor(emit, largest)
        emit.store(scale, self._out)
        with emit.loop(0, row.columns // row.block_columns, carried=[emit.word(0)] * 2) as turn:
            source = emit.add(self._source, emit.mul(turn.index, 4 * row.block_columns))
            out = emit.add(self._out, emit.add(emit.mul(turn.index, row.block_bytes), row.blocks_at))
            before = [emit.word(0)] * 2 if row.has_block_corrections else turn.carried
            sums = self._write_block(self._digits_of(source, factor), out, before)
            if row.has_block_corrections:
                total = emit.build.add(emit.build.shl(sums[0], emit.word(8)), sums[1])
                emit.store(emit.build.neg(total), emit.add(out, 2 * row.vectors * row.vector_bytes))
            else:
                turn.carried = sums
        for i, total in enumerate(turn.carried):
            emit.store(emit.build.neg(total), emit.add(self._out, LINE_BYTES + i * row.vector_bytes))

    def _largest(self) -> Any:
        """The largest magnitude; infinite or no number where a value is."""
        emit = self._emit
        with emit.loop(0, self._row.columns, step=emit.lanes, carried=[emit.word(0)]) as turn:
            words = emit.load(emit.words, emit.add(self._source, emit.mul(turn.index, 4)))
            turn.carried = [larger_magnitudes(emit, words, turn.carried[0])]
        name = f"llvm.vector.reduce.umax.v{emit.lanes}i32"
        return emit.build.bitcast(emit.call(name, I32, turn.carried), F32)

    def _digits_of(self, source: Any, factor: Any) -> list[Any]:
        """High and low digits of a block of columns, a byte each."""
        floats = self._emit.load(ir.VectorType(F32, self._row.block_columns), source)
        return digit_bytes(self._emit, floats, factor)

    def _write_block(self, digits: list[Any], out: Any, sums: list[Any]) -> list[Any]:
        """Store a block; `sums` of its high and low digits, times the offset of weights, grow."""
        emit, row = self._emit, self._row
        offset = emit.word(0x01010101 * self._rows.offset)
        sums = list(sums)
        for digit, octets in enumerate(digits):
            for v, columns in enumerate(self._rows.order(emit.lanes)):
                mask = ir.Constant(ir.VectorType(I32, row.vector_bytes), columns.tolist())
                vector = emit.build.bitcast(emit.build.shuffle_vector(octets, octets, mask), emit.words)
                emit.store(vector, emit.add(out, (digit * row.vectors + v) * row.vector_bytes))
                sums[digit] = emit.dot_bytes(offset, vector, sums[digit])
        return sums
