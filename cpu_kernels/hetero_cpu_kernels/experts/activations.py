"""How activations lie in memory, so that no kernel ever moves a lane.

    float32      [tokens, padded]              blocks in the order of `encodings`
    pairs        [tokens, padded] bfloat16     what two vectors of a block hold, one after the other
    tiles        [groups of 16 tokens, padded / 2, 16 tokens, 2] bfloat16: a row of a tile is two columns
    digits       [tokens] rows of float32 in their own order, each with its `digits` behind it
    digit_tiles  [groups of 16 tokens] `digit_tiles`, for the down projection behind float32 [columns, 16]

`padded` columns are whole blocks; those behind the end are zero.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hetero_cpu_kernels.experts.digits import DigitRow
from hetero_cpu_kernels.experts.emitter import LINE_BYTES
from hetero_cpu_kernels.experts.integer_rows import IntegerRows
from hetero_cpu_kernels.experts.rows import Rows
from hetero_cpu_kernels.experts.targets import Unit

TILE = 16
"""Tokens, rows, or words of a row, in a full tile."""
TILE_COLUMNS = 2 * TILE
"""Columns of bfloat16 that one product of tiles adds up."""
TILE_BYTES = 1024
BYTE_COLUMNS = 4 * TILE
"""Columns of bytes that one product of tiles adds up."""
PANEL_TILE_BYTES = TILE_BYTES + LINE_BYTES
"""From one tile of weights to the next. A row is written to every tile: at a distance of 1024 bytes its lines
would fight for four sets of the first cache."""

FLOAT32, PAIRS, TILES, DIGITS, DIGIT_TILES = range(5)
UNIT_CODES: dict[Unit, int] = {
    "float32": FLOAT32,
    "pairs": PAIRS,
    "tiles": TILES,
    "digits": DIGITS,
    "digit_tiles": DIGIT_TILES,
}
"""What compiled code calls a layout's unit."""


@dataclass(frozen=True)
class Layout:
    """Of activations with `columns` columns. `order[p]`: which column of a block lies at its position p."""

    unit: Unit
    columns: int
    order: npt.NDArray[np.int64]
    digit_bytes: int = 0
    """Of a token."""
    has_floats: bool = True
    """Whether digits in tiles have float32 in front of them."""

    @classmethod
    def of_digits(cls, rows: IntegerRows, lanes: int) -> Layout:
        """For products of integers with `rows`."""
        row = DigitRow.of(rows, lanes)
        return cls("digits", row.columns, np.arange(lanes), row.num_bytes)

    @classmethod
    def of_digit_tiles(cls, columns: int, *, has_floats: bool) -> Layout:
        """For products of tiles of bytes: whole tiles. A token has a scale and two digits a column."""
        return cls("digit_tiles", columns, np.arange(BYTE_COLUMNS), 4 + 2 * columns, has_floats)

    @classmethod
    def of(cls, rows: Rows, lanes: int, *, unit: Unit) -> Layout:
        """For products with `rows`, or with what `panel` makes of them."""
        order = rows.order(lanes)  # [vectors, lanes]
        return cls(unit, rows.matrix.cols, np.ascontiguousarray(order.reshape(-1)))

    @property
    def place(self) -> npt.NDArray[np.int64]:
        """The position in its block of each column of it."""
        return np.argsort(self.order)

    @property
    def padded(self) -> int:
        """Columns with the zeros behind them."""
        block = max(self.order.size, TILE_COLUMNS if self.unit == "tiles" else 1)
        return -(-self.columns // block) * block

    @property
    def digits_at(self) -> int:
        """Where a token's digits begin, or in tiles a group's, in bytes from its first value; 0 without."""
        if self.unit == "digit_tiles":
            return TILE * 4 * self.padded * self.has_floats
        return -(-4 * self.padded // LINE_BYTES) * LINE_BYTES if self.digit_bytes else 0

    @property
    def panel_row_bytes(self) -> int:
        """Bytes of a row of weights in a panel; 16 rows of tiles are so many times 16. Bytes need none."""
        if self.unit == "digit_tiles":
            return 0
        if self.unit == "tiles":
            return self.padded // TILE_COLUMNS * PANEL_TILE_BYTES // TILE
        return self.row_bytes

    @property
    def row_bytes(self) -> int:
        """Bytes of one token."""
        if self.unit == "digit_tiles":
            return self.digits_at // TILE + self.digit_bytes
        if self.unit == "digits":
            return self.digits_at + self.digit_bytes
        return self.padded * (4 if self.unit == "float32" else 2)
