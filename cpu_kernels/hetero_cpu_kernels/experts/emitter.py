"""Writing LLVM's language: loops, vectors of float32, loads at addresses, whatever the instruction set.

A kernel is a Python function that writes it down, so that unrolling is a Python loop and the number of
lanes, of rows and of tokens are Python numbers. LLVM splits vectors that a machine has not. Addresses
are 64-bit integers. Additions and products keep their order: a result depends on the target's lanes,
not on how LLVM arranged the code.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from llvmlite import ir

I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
F16, F32 = ir.HalfType(), ir.FloatType()
POINTER = ir.PointerType()

LINE_BYTES = 64


class _Bfloat(ir.Type):  # type: ignore[misc]
    """LLVM's bfloat, which llvmlite does not name."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Bfloat)

    def __hash__(self) -> int:
        return hash(_Bfloat)


BF16 = _Bfloat()


@dataclass
class Loop:
    """Inside a loop: its index, and the values that it carries from one turn to the next."""

    index: Any
    carried: list[Any] = field(default_factory=list)


class Emitter:
    """Writes one function `void name(i64 *arguments)` into a module.

    `lanes`: float32 lanes of a vector.
    """

    def __init__(self, module: ir.Module, name: str, *, lanes: int) -> None:
        function = ir.Function(module, ir.FunctionType(ir.VoidType(), [POINTER]), name)
        self.module = module
        self.lanes = lanes
        self.build = ir.IRBuilder(function.append_basic_block("entry"))
        self._arguments = function.args[0]

    # Scalars

    def argument(self, index: int) -> Any:
        """The 64-bit argument number `index`."""
        place = self.build.gep(self._arguments, [I32(index)], source_etype=I64)
        return self.build.load(place, typ=I64)

    def add(self, a: Any, b: Any) -> Any:
        """Sum of 64-bit integers; Python's numbers are constants."""
        return self.build.add(_i64(a), _i64(b))

    def mul(self, a: Any, b: Any) -> Any:
        """Product of 64-bit integers; Python's numbers are constants."""
        return self.build.mul(_i64(a), _i64(b))

    def load(self, kind: Any, address: Any) -> Any:
        """A value of any type at an address that need not be aligned."""
        return self.build.load(self.build.inttoptr(address, POINTER), typ=kind, align=1)

    def store(self, value: Any, address: Any) -> None:
        """Write a value to an address that need not be aligned."""
        self.build.store(value, self.build.inttoptr(address, POINTER), align=1)

    def prefetch(self, address: Any, *, level: int = 1) -> None:
        """Ask for a cache line, into the cache of a level; an address outside of memory does no harm."""
        pointer = self.build.inttoptr(address, POINTER)
        self.call("llvm.prefetch.p0", ir.VoidType(), [pointer, I32(0), I32(4 - level), I32(1)])

    # Vectors

    @property
    def floats(self) -> Any:
        """The type of a vector of float32."""
        return ir.VectorType(F32, self.lanes)

    @property
    def words(self) -> Any:
        """The type of a vector of 32-bit integers."""
        return ir.VectorType(I32, self.lanes)

    def splat(self, scalar: Any, *, times: int = 1) -> Any:
        """A vector of equal values, `times` as many as it has 32-bit lanes."""
        return self._repeated(scalar, times * self.lanes)

    def _repeated(self, scalar: Any, count: int) -> Any:
        undefined = ir.Constant(ir.VectorType(scalar.type, count), ir.Undefined)
        one = self.build.insert_element(undefined, scalar, I32(0))
        return self.build.shuffle_vector(one, undefined, ir.Constant(ir.VectorType(I32, count), [0] * count))

    def word(self, number: int) -> Any:
        """A constant vector of 32-bit integers."""
        return ir.Constant(self.words, [number] * self.lanes)

    def zeros(self) -> Any:
        """A vector of 0.0."""
        return ir.Constant(self.floats, [0.0] * self.lanes)

    def fma(self, a: Any, b: Any, c: Any) -> Any:
        """a · b + c, rounded once."""
        return self.call(f"llvm.fma.v{self.lanes}f32", self.floats, [a, b, c])

    def dot_pairs(self, a: Any, b: Any, c: Any) -> Any:
        """c + a0 · b0 + a1 · b1 of the two bfloat16 in each word (vdpbf16ps, 16 lanes)."""
        pairs = ir.VectorType(BF16, 2 * self.lanes)
        casts = [self.build.bitcast(words, pairs) for words in (a, b)]
        return self.call("llvm.x86.avx512bf16.dpbf16ps.512", self.floats, [c, *casts])

    def round_to_pairs(self, first: Any, second: Any) -> Any:
        """The nearest bfloat16 of both vectors, one after the other, as words (vcvtne2ps2bf16, 16 lanes)."""
        name = "llvm.x86.avx512bf16.cvtne2ps2bf16.512"
        halves = self.call(name, ir.VectorType(BF16, 2 * self.lanes), [second, first])
        return self.build.bitcast(halves, self.words)

    def dot_bytes(self, unsigned: Any, signed: Any, c: Any) -> Any:
        """c + the four products of bytes in each word, exact; the first operand's are unsigned (vpdpbusd)."""
        name = f"llvm.x86.avx512.vpdpbusd.{32 * self.lanes}"
        return self.call(name, self.words, [c, unsigned, signed])

    def as_integers(self, floats: Any) -> Any:
        """32-bit integers of a vector of whole numbers that fit, 0 of NaN.

        LLVM's conversion that knows NaN and what does not fit takes one lane after the other.
        """
        kind = floats.type
        is_number = self.build.fcmp_ordered("ord", floats, floats)
        held = self.build.select(is_number, floats, ir.Constant(kind, [0.0] * kind.count))
        return self.build.fptosi(held, ir.VectorType(I32, kind.count))

    def as_floats(self, words: Any) -> Any:
        """The same bits as float32."""
        return self.build.bitcast(words, self.floats)

    def sum_lanes(self, vectors: Sequence[Any]) -> Any:
        """The sum of each vector's lanes, as one vector: of up to `lanes` vectors, a power of two of them.

        Halves of a vector are added until one lane is left; while there are several vectors, two are added at
        once. Each sum is the same to the bit whether its vector comes alone or with others.
        """
        width = self.lanes  # lanes that each vector still has
        vectors = list(vectors)
        while width > 1:
            width //= 2
            pairs = zip(vectors[::2], vectors[1::2], strict=True) if len(vectors) > 1 else [(*vectors, None)]
            vectors = [self._add_halves(first, second, width) for first, second in pairs]
        return vectors[0]

    def _add_halves(self, first: Any, second: Any, width: int) -> Any:
        """First and second `width` lanes of each run of twice as many, added; runs of `second` come last."""
        length = first.type.count * (1 if second is None else 2)
        other = first if second is None else second
        halves = []
        for half in range(2):
            lanes = [lane for lane in range(length) if lane // width % 2 == half]
            mask = ir.Constant(ir.VectorType(I32, len(lanes)), lanes)
            halves.append(self.build.shuffle_vector(first, other, mask))
        return self.build.fadd(*halves)

    def part(self, vector: Any, first: int, count: int) -> Any:
        """`count` lanes of a vector from `first` on, as a vector."""
        mask = ir.Constant(ir.VectorType(I32, count), list(range(first, first + count)))
        return self.build.shuffle_vector(vector, vector, mask)

    def picked_bytes(self, source: Any, octets: Sequence[Sequence[int]]) -> Any:
        """For each lane its four bytes, lowest first, of an integer of up to eight; -1 for zero (x86)."""
        copies = ir.VectorType(I8, 4 * self.lanes)
        wide = self.build.bitcast(self._repeated(source, 32 * self.lanes // source.type.width), copies)
        mask = ir.Constant(copies, [octet & 0xFF for of_lane in octets for octet in of_lane])
        name = "llvm.x86.avx512.pshuf.b.512" if self.lanes == 16 else "llvm.x86.avx2.pshuf.b"
        return self.build.bitcast(self.call(name, copies, [wide, self._unknown(mask)]), self.words)

    def _unknown(self, constant: Any) -> Any:
        """A constant that LLVM does not know: of vpshufb with a known one it makes vpermt2b, three times the
        operations."""
        held = ir.GlobalVariable(self.module, constant.type, self.module.get_unique_name("mask"))
        held.initializer = constant
        with self.build.goto_entry_block():
            return self.build.load(held, typ=constant.type)

    def look_up_bytes(self, indices: Any, table: Sequence[int]) -> Any:
        """For each of 64 bytes that of 128 whose number its lower seven bits are (AVX-512 VBMI)."""
        kind = indices.type
        first, second = (ir.Constant(kind, list(half)) for half in (table[:64], table[64:]))
        return self.call("llvm.x86.avx512.vpermi2var.qi.512", kind, [first, indices, second])

    def permute(self, table: Any, indices: Any) -> Any:
        """Lane `indices[l] % 16` of 16 words of floats or integers, for each lane l (AVX-512)."""
        kind = "sf" if table.type.element == F32 else "si"
        return self.call(f"llvm.x86.avx512.permvar.{kind}.512", table.type, [table, indices])

    # Structure

    def call(self, name: str, result: Any, arguments: Sequence[Any]) -> Any:
        """Call a function of LLVM's by name."""
        function = self.module.globals.get(name)
        if function is None:
            kind = ir.FunctionType(result, [argument.type for argument in arguments])
            function = ir.Function(self.module, kind, name)
        return self.build.call(function, arguments)

    @contextmanager
    def loop(self, first: Any, end: Any, *, step: int = 1, carried: Sequence[Any] = ()) -> Iterator[Loop]:
        """for index in range(first, end, step).

        `carried`: values at the start. The body reads and replaces `Loop.carried`; after the loop it has
        the last values.
        """
        build, entry = self.build, self.build.block
        head, body, done = (build.append_basic_block(part) for part in ("head", "body", "done"))
        build.branch(head)
        build.position_at_end(head)
        phis = [build.phi(start.type) for start in (_i64(first), *carried)]
        for phi, start in zip(phis, (_i64(first), *carried), strict=True):
            phi.add_incoming(start, entry)
        build.cbranch(build.icmp_signed("<", phis[0], _i64(end)), body, done)
        build.position_at_end(body)
        turn = Loop(phis[0], list(phis[1:]))
        yield turn
        assert len(turn.carried) == len(carried), "a loop carries as many values on as it started with"
        for phi, value in zip(phis, (build.add(phis[0], I64(step)), *turn.carried), strict=True):
            phi.add_incoming(value, build.block)
        build.branch(head)
        build.position_at_end(done)
        turn.carried = list(phis[1:])

    def finish(self) -> None:
        """End the function."""
        self.build.ret_void()


def _i64(value: Any) -> Any:
    return I64(value) if isinstance(value, int) else value
