"""How quantised experts are written, in numbers alone: for the plan before loading, and for loading.

    int8   one float32 scale a row
    int4   one bfloat16 scale for each 32 columns of a row
    fp8    e4m3, one float32 scale for each block of 128 × 128
    bf16   no scales: the weights, rounded

Only matrices are quantised, always as [outputs, inputs]; biases stay as the checkpoint has them. The kernels
read these layouts: `hetero_cpu_kernels.experts.form`, `hetero_gpu.experts.layout`.
"""

from __future__ import annotations

from dataclasses import dataclass

from hetero_runtime.checkpoint.safetensors_file import DTYPE_BYTES
from hetero_runtime.errors import ConfigError

FLOAT_DTYPES = ("F32", "F16", "BF16")
"""Dtypes of matrices that can be written in another format."""
WORKERS_A_THREAD = 2
"""Records in the making for each thread: while one is read or written, the other is computed."""


@dataclass(frozen=True)
class Encoding:
    """One of the formats of `model.experts`. Dtypes are safetensors' names."""

    name: str
    value_dtype: str
    columns_a_value: int = 1
    """Columns that one element of `value_dtype` holds."""
    scale_dtype: str | None = None
    block: tuple[int, int | None] = (1, None)
    """Rows and columns that share a scale; None: the whole row."""

    def value_shape(self, rows: int, cols: int) -> tuple[int, int]:
        """Elements of the field of values."""
        return rows, cols // self.columns_a_value

    def scale_shape(self, rows: int, cols: int) -> tuple[int, int, int]:
        """Elements of the field of scales; the first axis is one part."""
        block_rows, block_cols = self.block_of(cols)
        return 1, -(-rows // block_rows), -(-cols // block_cols)

    def block_of(self, cols: int) -> tuple[int, int]:
        """Rows and columns that share a scale in a matrix of so many columns."""
        return self.block[0], self.block[1] or cols

    def field_bytes(self, rows: int, cols: int) -> list[int]:
        """Bytes of values and, where there are some, scales."""
        values = rows * cols // self.columns_a_value * DTYPE_BYTES[self.value_dtype]
        if self.scale_dtype is None:
            return [values]
        _, row_blocks, col_blocks = self.scale_shape(rows, cols)
        return [values, row_blocks * col_blocks * DTYPE_BYTES[self.scale_dtype]]

    def check(self, name: str, dtype: str, cols: int) -> None:
        """Raise ConfigError, with the fix, when the matrix `name` cannot be written so."""
        if dtype not in FLOAT_DTYPES:
            raise ConfigError(
                f"model.experts: {self.name} is for experts of {', '.join(FLOAT_DTYPES)}, and {name} of this "
                f"checkpoint is {dtype}: it is quantised already; write model.experts: checkpoint"
            )
        if cols % self.columns_a_value:
            raise ConfigError(
                f"model.experts: {self.name} packs two columns a byte, and {name} has {cols} columns; write "
                f"model.experts: int8 or fp8"
            )


ENCODINGS = {
    encoding.name: encoding
    for encoding in (
        Encoding("bf16", "BF16"),
        Encoding("fp8", "F8_E4M3", scale_dtype="F32", block=(128, 128)),
        Encoding("int8", "I8", scale_dtype="F32"),
        Encoding("int4", "U8", columns_a_value=2, scale_dtype="BF16", block=(1, 32)),
    )
}
"""By their names in `model.experts`."""
