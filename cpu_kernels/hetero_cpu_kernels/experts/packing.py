"""A bf16 record at twelve bits an element, as the host bank may hold it, described for its readers.

    packed   |sign+mantissa bytes |codes        |table      |escapes
    offset    0                    n             codes_at + n/2

    table    word c: first escape of chunk c << 8 | base of chunk c; word C: number of escapes << 8
    escape   index in its chunk << 16 | the 16 bits of the element; ascending
    codes    a word has the codes of 2 x 4 elements: word j of a chunk those of elements 4j .. 4j+3 in its
             low half, those of the same four of the chunk's second half above

    code 0        exponent 0: zeros and denormals
    code 1 .. 14  exponent base + code
    code 15       escape: zero (or a denormal) to the kernels, and added from the list afterwards

Words are 32 bits, little-endian. So lane l of four vectors of word j + l holds elements 4(j + l) .. + 3.
"""

from __future__ import annotations

from dataclasses import dataclass

CHUNK_ELEMENTS = 16384
"""Elements that share a base; the last chunk may be shorter."""
BLOCK_ELEMENTS = 64
"""Rows begin and end at multiples of so many elements: then no block crosses the middle of a chunk."""

_ALIGN_BYTES = 16


@dataclass(frozen=True)
class Packing:
    """Where the parts of a packed record of `num_elements` bf16 elements lie, in bytes."""

    num_elements: int

    def __post_init__(self) -> None:
        if self.num_elements % (2 * BLOCK_ELEMENTS):
            raise ValueError(
                f"packed records of {self.num_elements} elements: not a multiple of {2 * BLOCK_ELEMENTS}"
            )

    @property
    def num_chunks(self) -> int:
        return -(-self.num_elements // CHUNK_ELEMENTS)

    @property
    def last_half(self) -> int:
        """Elements of half of the last chunk."""
        return (self.num_elements - (self.num_chunks - 1) * CHUNK_ELEMENTS) // 2

    @property
    def codes_at(self) -> int:
        return self.num_elements

    @property
    def table_at(self) -> int:
        return self.codes_at + self.num_elements // 2

    @property
    def escapes_at(self) -> int:
        end = self.table_at + 4 * (self.num_chunks + 1)
        return -(-end // _ALIGN_BYTES) * _ALIGN_BYTES
