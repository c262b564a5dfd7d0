"""The packed record: a bf16 record at twelve bits an element, and what does not fit those beside it.

Trained weights use few of the 256 exponents: almost all of a neighbourhood lie in a window of fourteen. So an
element (sign 1, exponent 8, mantissa 7) is kept as a byte of sign and mantissa, and four bits of exponent:

    code 0        exponent 0: zeros (the padding of a record too) and denormals
    code 1 .. 14  exponent base + code, the base chosen for each chunk of elements
    code 15       escape: the element is kept whole in the list of escapes

    packed   |sign+mantissa bytes |codes        |table      |escapes       | to a page
    offset    0                    n             codes_at + n/2             packed_bytes
              n bytes              n/2 bytes     C+1 words   capacity words

    table    word c: first escape of chunk c << 8 | base of chunk c; word C: number of escapes << 8
    escape   index in its chunk << 16 | the 16 bits of the element; ascending
    codes    a word has the codes of 2 x 4 elements: word j of a chunk those of elements 4j .. 4j+3 in its
             low half, those of the same four of the chunk's second half above, each from the lowest bits
             up. Mantissa words j and j + half and code word j then decode without moving between lanes.

Words are 32 bits, little-endian. All parts begin at multiples of 16 bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

CHUNK_ELEMENTS = 16384
"""What one program decodes at a time; the last chunk may be shorter."""
WINDOW = 14
"""Exponents that have a code of their own in a chunk, zero aside."""
ESCAPE = 15
ELEMENTS_AN_ESCAPE = 256
"""A record has room for one escape in so many elements: gaussian weights have one in 4000."""
PAGE_BYTES = 4096
"""Packed records are whole pages, so that CUDA can register any run of them."""
RING_BUFFERS = 4
"""Packed records that the copy engine may be ahead of their decoding, in device memory."""

_ALIGN_BYTES = 16
_ALIGN_ELEMENTS = 32


@dataclass(frozen=True)
class PackedLayout:
    """Where the parts of a packed record of `num_elements` bf16 elements lie, in bytes."""

    num_elements: int

    def __post_init__(self) -> None:
        if self.num_elements < 1 or self.num_elements % _ALIGN_ELEMENTS:
            raise ValueError(f"{self.num_elements} elements: not a multiple of {_ALIGN_ELEMENTS}")

    @classmethod
    def of(cls, record_bytes: int) -> PackedLayout | None:
        """For records of `record_bytes`; None where packing would save nothing: records of a page or two."""
        if record_bytes < 1 or record_bytes % (2 * _ALIGN_ELEMENTS):
            return None
        layout = cls(record_bytes // 2)
        return layout if layout.packed_bytes < record_bytes else None

    @property
    def plain_bytes(self) -> int:
        """Bytes of the record in a slab."""
        return 2 * self.num_elements

    @property
    def packed_bytes(self) -> int:
        """Bytes of the record in the host bank."""
        least_escapes = -(-self.num_elements // ELEMENTS_AN_ESCAPE)
        return _round_up(self.escapes_at + 4 * least_escapes, PAGE_BYTES)

    @property
    def num_chunks(self) -> int:
        return -(-self.num_elements // CHUNK_ELEMENTS)

    @property
    def codes_at(self) -> int:
        return self.num_elements

    @property
    def table_at(self) -> int:
        return self.codes_at + self.num_elements // 2

    @property
    def escapes_at(self) -> int:
        return _round_up(self.table_at + 4 * (self.num_chunks + 1), _ALIGN_BYTES)

    @property
    def capacity(self) -> int:
        """Escapes that a record has room for."""
        return (self.packed_bytes - self.escapes_at) // 4


def _round_up(num_bytes: int, step: int) -> int:
    return -(-num_bytes // step) * step
