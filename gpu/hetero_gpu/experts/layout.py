"""Where the kernels find an expert's weights in its record, and how those are written.

    slabs    |slab 0        |slab 1        | ...            one base address, `record_bytes` each
    record   |up values |up scales |up bias |down values |down scales |down bias |
              ^ offset   ^ scales.offset     bytes from the start of the record, in any order

A matrix is `[rows, cols]`: rows are outputs, cols inputs. These descriptions are compile-time constants of
the kernels: one compilation serves every slab.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

FloatEncoding = Literal["float32", "float16", "bfloat16"]
Encoding = Literal["float32", "float16", "bfloat16", "fp8", "int8", "int4", "fp4"]
"""How one value is written.

    fp8    e4m3, one byte
    int8   two's complement, one byte
    int4   value + 8, two a byte, even column in the low nibble
    fp4    e2m1, two a byte, even column in the low nibble
"""

FLOATS = ("float32", "float16", "bfloat16")
PACKED = ("int4", "fp4")

ALIGN = 16
"""Bytes of one load of one thread: fields and records start at multiples of it."""

_BITS = {"float32": 32, "float16": 16, "bfloat16": 16, "fp8": 8, "int8": 8, "int4": 4, "fp4": 4, "e8m0": 8}


@dataclass(frozen=True)
class Scales:
    """One factor for each block: `[parts, ceil(rows / parts / block_rows), ceil(cols / block_cols)]`.

    `parts`: how many matrices were fused by rows (gate and up: 2), each with blocks of its own.
    `e8m0`: a power of two, one byte. An int8 matrix with one scale for each row has `block_rows` 1 and
    `block_cols` equal to its cols.
    """

    offset: int
    encoding: Literal["float32", "float16", "bfloat16", "e8m0"]
    block_rows: int
    block_cols: int
    parts: int = 1


@dataclass(frozen=True)
class Bias:
    """One value for each row of the matrix."""

    offset: int
    encoding: FloatEncoding


@dataclass(frozen=True)
class Matrix:
    """`[rows, cols]` at `offset` bytes; `is_transposed`: memory holds `[cols, rows]` (floats only).

    Raises ValueError when the description is not one that the kernels can read.
    """

    offset: int
    encoding: Encoding
    rows: int
    cols: int
    is_transposed: bool = False
    scales: Scales | None = None
    bias: Bias | None = None

    def __post_init__(self) -> None:
        if self.offset % ALIGN:
            raise ValueError(f"a matrix at byte {self.offset}: must be a multiple of {ALIGN}")
        is_quantized = self.encoding not in FLOATS
        if is_quantized != (self.scales is not None):
            raise ValueError(f"a matrix of {self.encoding} {'needs' if is_quantized else 'has no'} scales")
        if is_quantized and self.is_transposed:
            raise ValueError(f"a transposed matrix of {self.encoding}: only floats may be transposed")
        if self.is_packed and self.cols % 2:
            raise ValueError(f"{self.encoding} packs two columns a byte, and {self.cols} columns are odd")
        if self.scales is not None and self.rows % self.scales.parts:
            raise ValueError(f"{self.rows} rows are not {self.scales.parts} equal parts")

    @property
    def num_bytes(self) -> int:
        """Bytes of the values alone."""
        return self.rows * self.cols * _BITS[self.encoding] // 8

    @property
    def scale_shape(self) -> tuple[int, int, int]:
        """`[parts, row blocks, column blocks]`; only for a matrix with scales."""
        assert self.scales is not None, f"a matrix of {self.encoding} has no scales"
        rows = self.rows // self.scales.parts
        blocks = -(-rows // self.scales.block_rows), -(-self.cols // self.scales.block_cols)
        return self.scales.parts, *blocks

    @property
    def is_packed(self) -> bool:
        """Whether a byte holds two columns."""
        return self.encoding in PACKED

    @property
    def is_row_scaled(self) -> bool:
        """Whether all columns of a row share one scale."""
        return self.scales is not None and self.scales.block_cols >= self.cols

    @property
    def end(self) -> int:
        """The first byte after all that belongs to the matrix."""
        end = self.offset + self.num_bytes
        if self.scales is not None:
            parts, row_blocks, col_blocks = self.scale_shape
            scale_bytes = parts * row_blocks * col_blocks * _BITS[self.scales.encoding] // 8
            end = max(end, self.scales.offset + scale_bytes)
        if self.bias is not None:
            end = max(end, self.bias.offset + self.rows * _BITS[self.bias.encoding] // 8)
        return end


@dataclass(frozen=True)
class Gate:
    """What becomes of the outputs of the up projection, g (gate) and u (up); `limit` clamps where named.

        silu           g · sigmoid(g) · u
        clamped_silu   the same, of min(g, limit) and clamp(u, ±limit)                  (DeepSeek-V4)
        gpt_oss        g · sigmoid(alpha · g) · (u + 1), of min(g, limit) and clamp(u, ±limit)

    `is_interleaved`: rows alternate g0 u0 g1 u1 ...; else all gates come before all ups.
    """

    function: Literal["silu", "clamped_silu", "gpt_oss"] = "silu"
    is_interleaved: bool = False
    limit: float = 0.0
    alpha: float = 1.0

    def __post_init__(self) -> None:
        if (self.function == "silu") != (self.limit == 0.0) or self.limit < 0:
            raise ValueError(
                f"gate {self.function!r} with limit {self.limit}: silu has none, others need one"
            )


@dataclass(frozen=True)
class ExpertFormat:
    """All that the kernels know of one expert: `up` is `[2I, H]`, `down` `[H, I]`."""

    record_bytes: int
    up: Matrix
    down: Matrix
    gate: Gate = Gate()

    def __post_init__(self) -> None:
        if (self.up.rows, self.up.cols) != (2 * self.down.cols, self.down.rows):
            raise ValueError(
                f"up [{self.up.rows}, {self.up.cols}] and down [{self.down.rows}, {self.down.cols}] are not "
                "[2I, H] and [H, I]"
            )
        needed = max(self.up.end, self.down.end)
        if self.record_bytes < needed or self.record_bytes % ALIGN:
            raise ValueError(
                f"a record of {self.record_bytes} bytes: must be a multiple of {ALIGN} and hold {needed}"
            )

    @property
    def hidden(self) -> int:
        """H"""
        return self.up.cols

    @property
    def intermediate(self) -> int:
        """I"""
        return self.down.cols
