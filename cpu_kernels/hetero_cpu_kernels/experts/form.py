"""What the kernels know of a record: where an expert's weights lie in it and how they are written.

    bank     |record of an expert |record       | ...          one uint8 array, records at any offset
    record   |up values |up scales |up bias |down values |down scales |down bias |
              ^ offset   ^ scales.offset     bytes from the start of the record, in any order

A matrix is `[rows, cols]`, row after row: rows are outputs, cols inputs. Forms are constants of the
compiled kernels: one compilation serves every record of a model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

FloatEncoding = Literal["float32", "float16", "bfloat16"]
Encoding = Literal["float32", "float16", "bfloat16", "fp8", "int8", "int4", "fp4"]
"""How one value is written.

    fp8    e4m3, one byte; its two NaN patterns read as ±480
    int8   two's complement, one byte
    int4   value + 8, two a byte, even column in the low nibble
    fp4    e2m1, two a byte, even column in the low nibble
"""

BITS = {"float32": 32, "float16": 16, "bfloat16": 16, "fp8": 8, "int8": 8, "int4": 4, "fp4": 4, "e8m0": 8}
FLOATS = ("float32", "float16", "bfloat16")
GROUP_COLUMNS = 32
"""Scale blocks are whole multiples of so many columns, or one covers the whole row."""


@dataclass(frozen=True)
class Scales:
    """One factor for each block: `[parts, ceil(rows / parts / block_rows), ceil(cols / block_cols)]`.

    `parts`: how many matrices were fused by rows (gate and up: 2), each with blocks of its own.
    `e8m0`: a power of two, one byte (255, NaN by the format, reads as infinity).
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
    """`[rows, cols]` at `offset` bytes. Raises ValueError for what the kernels cannot read."""

    offset: int
    encoding: Encoding
    rows: int
    cols: int
    scales: Scales | None = None
    bias: Bias | None = None

    def __post_init__(self) -> None:
        is_quantized = self.encoding not in FLOATS
        if is_quantized != (self.scales is not None):
            raise ValueError(f"a matrix of {self.encoding} {'needs' if is_quantized else 'has no'} scales")
        if self.cols * BITS[self.encoding] % 8:
            raise ValueError(f"{self.encoding} packs two columns a byte, and {self.cols} columns are odd")
        if self.scales is None:
            return
        if self.rows % self.scales.parts:
            raise ValueError(f"{self.rows} rows are not {self.scales.parts} equal parts")
        if self.scales.block_cols < self.cols and self.scales.block_cols % GROUP_COLUMNS:
            raise ValueError(
                f"scale blocks of {self.scales.block_cols} columns: must be a multiple of {GROUP_COLUMNS}, "
                f"or one for all {self.cols} columns"
            )

    @property
    def row_bytes(self) -> int:
        """Bytes from the values of one row to those of the next."""
        return self.cols * BITS[self.encoding] // 8

    @property
    def num_bytes(self) -> int:
        """Bytes of the values alone."""
        return self.rows * self.row_bytes

    @property
    def scale_shape(self) -> tuple[int, int, int]:
        """`[parts, row blocks, column blocks]`; only for a matrix with scales."""
        assert self.scales is not None, f"a matrix of {self.encoding} has no scales"
        rows = self.rows // self.scales.parts
        blocks = -(-rows // self.scales.block_rows), -(-self.cols // self.scales.block_cols)
        return self.scales.parts, *blocks

    @property
    def end(self) -> int:
        """The first byte after all that belongs to the matrix."""
        end = self.offset + self.num_bytes
        if self.scales is not None:
            parts, row_blocks, col_blocks = self.scale_shape
            scale_bytes = parts * row_blocks * col_blocks * BITS[self.scales.encoding] // 8
            end = max(end, self.scales.offset + scale_bytes)
        if self.bias is not None:
            end = max(end, self.bias.offset + self.rows * BITS[self.bias.encoding] // 8)
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
class ExpertForm:
    """All that the kernels know of one expert: `up` is `[2I, H]`, `down` `[H, I]`.

    `packed_elements`: the record is of so many bf16 elements and lies packed in the bank (`packing` has
    the format); offsets are then those of the record before it was packed.
    """

    record_bytes: int
    up: Matrix
    down: Matrix
    gate: Gate = Gate()
    packed_elements: int = 0

    def __post_init__(self) -> None:
        up, down = self.up, self.down
        if (up.rows, up.cols) != (2 * down.cols, down.rows):
            raise ValueError(
                f"up [{up.rows}, {up.cols}] and down [{down.rows}, {down.cols}] are not [2I, H] and [H, I]"
            )
        needed = max(up.end, down.end)
        plain_bytes = 2 * self.packed_elements if self.packed_elements else self.record_bytes
        if plain_bytes < needed:
            raise ValueError(f"a record of {plain_bytes} bytes cannot hold the {needed} of its matrices")
        if self.packed_elements and (up.bias or down.bias):
            raise ValueError("a packed record with biases: kernels would read them unpacked")

    @property
    def hidden(self) -> int:
        """H"""
        return self.up.cols

    @property
    def intermediate(self) -> int:
        """I"""
        return self.down.cols

    @property
    def weight_bytes(self) -> int:
        """Bytes of values and scales that one expert's computation reads, packed as they lie."""
        if self.packed_elements:
            return (self.up.num_bytes + self.down.num_bytes) * 3 // 4
        total = self.up.num_bytes + self.down.num_bytes
        for matrix in (self.up, self.down):
            if matrix.scales is not None:
                parts, row_blocks, col_blocks = matrix.scale_shape
                total += parts * row_blocks * col_blocks * BITS[matrix.scales.encoding] // 8
        return total
