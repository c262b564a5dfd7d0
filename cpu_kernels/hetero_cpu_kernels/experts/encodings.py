"""From bytes of a row to vectors of float32, in the order in which the bytes give them most cheaply.

A block is as many columns as one step decodes: `vectors` times the lanes. Lane l of vector v is column

    v · lanes + l             consecutive    float32, float16, fp8, int8
    vectors · l + v           interleaved    bfloat16, int4, fp4 (two to a word), packed bfloat16 (four)

Activations are brought into the same order once, so no lane ever moves in the inner loop.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir

from hetero_cpu_kernels.experts.emitter import F16, F32, I8, I16, I32, Emitter

Decode = Callable[[Emitter, Any], list[Any]]
"""Writes the decoding of the block at an address."""

_E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # twice the values
_INT4 = tuple(range(-8, 8))
_FP8_EXPONENTS = 2.0**8  # float16's exponent bias is 8 more than e4m3's


@dataclass(frozen=True)
class Decoder:
    """How a block of one encoding becomes vectors."""

    decode: Decode
    is_interleaved: bool
    factor: float = 1.0
    """What all decoded values must be multiplied with."""
    vectors: int = 2

    def columns(self, lanes: int) -> npt.NDArray[np.int64]:
        """`[vectors, lanes]`: the column of each lane of a block."""
        columns = np.arange(self.vectors * lanes)
        return columns.reshape(lanes, -1).T if self.is_interleaved else columns.reshape(-1, lanes)


def load_scale(emit: Emitter, encoding: str, address: Any) -> Any:
    """A vector of equal lanes from a scalar of a float encoding or e8m0."""
    build = emit.build
    if encoding == "float32":
        return emit.splat(emit.load(F32, address))
    if encoding == "float16":
        return emit.splat(build.fpext(emit.load(F16, address), F32))
    # Narrow lanes are filled, and what a wide one has too much is masked off.
    if encoding == "bfloat16":
        halves = emit.splat(emit.load(I16, address), times=2)
        return emit.as_floats(build.and_(build.bitcast(halves, emit.words), emit.word(0xFFFF0000)))
    octets = build.bitcast(emit.splat(emit.load(I8, address), times=4), emit.words)
    bits = build.and_(build.lshr(octets, emit.word(1)), emit.word(0x7F800000))
    least = emit.word(1 << 22)  # byte 0 is 2^-127, which float32 has only as a denormal
    return emit.as_floats(build.select(build.icmp_unsigned(">", bits, least), bits, least))


def _float32(emit: Emitter, address: Any) -> list[Any]:
    return [emit.load(emit.floats, emit.add(address, 4 * emit.lanes * v)) for v in range(2)]


def _float16(emit: Emitter, address: Any) -> list[Any]:
    halves = ir.VectorType(F16, emit.lanes)
    loaded = [emit.load(halves, emit.add(address, 2 * emit.lanes * v)) for v in range(2)]
    return [emit.build.fpext(half, emit.floats) for half in loaded]


def _bfloat16(emit: Emitter, address: Any) -> list[Any]:
    pairs = emit.load(emit.words, address)
    even = emit.build.shl(pairs, emit.word(16))
    odd = emit.build.and_(pairs, emit.word(0xFFFF0000))
    return [emit.as_floats(even), emit.as_floats(odd)]


def _fp8(emit: Emitter, address: Any) -> list[Any]:
    """Through float16, which has room for e4m3's denormals: shift sign and the rest to their places."""
    build, kind = emit.build, ir.VectorType(I16, emit.lanes)

    def word(number: int) -> Any:
        return ir.Constant(kind, [number] * emit.lanes)

    vectors = []
    for v in range(2):
        octets = emit.load(ir.VectorType(I8, emit.lanes), emit.add(address, emit.lanes * v))
        wide = build.shl(build.sext(octets, kind), word(7))  # the sign fills the upper byte
        half = build.bitcast(build.and_(wide, word(0xBFFF)), ir.VectorType(F16, emit.lanes))
        vectors.append(build.fpext(half, emit.floats))
    return vectors


def _int8(emit: Emitter, address: Any) -> list[Any]:
    octets = ir.VectorType(I8, emit.lanes)
    loaded = [emit.load(octets, emit.add(address, emit.lanes * v)) for v in range(2)]
    return [emit.build.sitofp(emit.build.sext(x, emit.words), emit.floats) for x in loaded]


def _nibbles(table: tuple[int, ...]) -> Decode:
    """Two codes a byte, looked up: among 16 lanes of float32 where those fit a register, else as bytes."""

    def decode(emit: Emitter, address: Any) -> list[Any]:
        build = emit.build
        octets = emit.load(ir.VectorType(I8, emit.lanes), address)
        if emit.lanes == len(table):
            low = build.zext(octets, emit.words)
            values = ir.Constant(emit.floats, [float(value) for value in table])
            codes = (low, build.lshr(low, emit.word(4)))
            return [emit.permute(values, code) for code in codes]
        four = ir.Constant(octets.type, [4] * emit.lanes)
        low = build.and_(octets, ir.Constant(octets.type, [15] * emit.lanes))
        looked = [_look_up(emit, table, code) for code in (low, build.lshr(octets, four))]
        return [build.sitofp(build.sext(value, emit.words), emit.floats) for value in looked]

    return decode


def _look_up(emit: Emitter, table: tuple[int, ...], codes: Any) -> Any:
    """One byte of `table` for each code."""
    sixteen = ir.VectorType(I8, 16)
    values = ir.Constant(sixteen, [value & 0xFF for value in table])
    wider = ir.Constant(ir.VectorType(I32, 16), [i % emit.lanes for i in range(16)])
    narrower = ir.Constant(ir.VectorType(I32, emit.lanes), list(range(emit.lanes)))
    wide = emit.build.shuffle_vector(codes, codes, wider)
    name = "llvm.aarch64.neon.tbl1.v16i8" if emit.lanes == 4 else "llvm.x86.ssse3.pshuf.b.128"
    found = emit.call(name, sixteen, [values, wide])
    return emit.build.shuffle_vector(found, found, narrower)


DECODERS = {
    "float32": Decoder(_float32, is_interleaved=False),
    "float16": Decoder(_float16, is_interleaved=False),
    "bfloat16": Decoder(_bfloat16, is_interleaved=True),
    "fp8": Decoder(_fp8, is_interleaved=False, factor=_FP8_EXPONENTS),
    "int8": Decoder(_int8, is_interleaved=False),
    "int4": Decoder(_nibbles(_INT4), is_interleaved=True),
    "fp4": Decoder(_nibbles(_E2M1), is_interleaved=True, factor=0.5),
}
