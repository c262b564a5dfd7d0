"""The compiled kernels of one matrix for one target, and the layouts that their activations have."""

from __future__ import annotations

from dataclasses import dataclass, replace

from llvmlite import ir

from hetero_cpu_kernels.experts.activations import TILE, Layout
from hetero_cpu_kernels.experts.digits import write_digits
from hetero_cpu_kernels.experts.dot import write_dot
from hetero_cpu_kernels.experts.encodings import DECODERS
from hetero_cpu_kernels.experts.form import ExpertForm, Matrix
from hetero_cpu_kernels.experts.integer_dot import write_integer_dot
from hetero_cpu_kernels.experts.integer_rows import IntegerRows, integer_rows_of
from hetero_cpu_kernels.experts.native import NativeCode
from hetero_cpu_kernels.experts.panel import write_panel
from hetero_cpu_kernels.experts.rows import PairRows, PlainRows, Rows, rows_of
from hetero_cpu_kernels.experts.split_rows import split_rows_of
from hetero_cpu_kernels.experts.targets import Target
from hetero_cpu_kernels.experts.tiles import write_tiles

TOKENS_AT_ONCE = (1, 2, 4)
"""Tokens that one kernel takes side by side."""


@dataclass(frozen=True)
class Program:
    """What is compiled for one matrix, before it is.

    few_1, few_2, few_4      weights decoded on the way, or multiplied as integers, so many tokens
    digits                   activations for the latter
    panel                    a few rows decoded for all tokens of an expert
    many_1, many_2, many_4   rows of a panel (or of the record, where `is_direct`), so many tokens
    tiles                    the same with tiles, instead of many_*
    """

    matrix: Matrix
    target: Target
    module: ir.Module
    few: Layout
    many: Layout
    is_direct: bool
    """Whether many tokens read the record's own bfloat16, undecoded."""

    @classmethod
    def write(cls, form: ExpertForm, matrix: Matrix, *, target: Target) -> Program:
        """Raises ValueError for a matrix that the kernels cannot read."""
        rows, integer_rows = rows_of(form, matrix), integer_rows_of(matrix, target)
        few_rows = split_rows_of(matrix, target) or rows
        is_direct = _is_direct(form, matrix, target)
        source: Rows = PairRows(matrix) if is_direct else rows
        program = cls(
            matrix,
            target,
            ir.Module(),
            few=(
                Layout.of_digits(integer_rows, target.lanes)
                if integer_rows
                else Layout.of(few_rows, target.lanes, unit="split" if few_rows.terms else "float32")
            ),
            many=Layout.of(source, target.lanes, unit=target.many),
            is_direct=is_direct,
        )
        if integer_rows:
            program._write_few_integers(integer_rows)
        else:
            program._write_few(few_rows)
        program._write_many(rows)
        return program

    @property
    def dense_row_bytes(self) -> int:
        """Bytes between rows of what many tokens are multiplied with."""
        return self.matrix.row_bytes if self.is_direct else self.many.row_bytes

    def compile(self) -> NativeCode:
        """Machine code; executable where the target is."""
        return NativeCode(self.module, self.target)

    def _write_few(self, rows: Rows) -> None:
        for tokens in TOKENS_AT_ONCE:
            write_dot(self.module, f"few_{tokens}", rows=rows, target=self.target, tokens=tokens)

    def _write_few_integers(self, rows: IntegerRows) -> None:
        write_digits(self.module, "digits", rows=rows, lanes=self.target.lanes)
        for tokens in TOKENS_AT_ONCE:
            write_integer_dot(self.module, f"few_{tokens}", rows=rows, target=self.target, tokens=tokens)

    def _write_many(self, rows: Rows) -> None:
        if not self.is_direct:
            write_panel(self.module, "panel", rows=rows, target=self.target, layout=self.many)
        if self.many.unit == "tiles":
            columns = self.matrix.cols if self.is_direct else self.many.padded
            write_tiles(self.module, "tiles", columns=columns, row_bytes=self.dense_row_bytes)
            return
        for tokens in TOKENS_AT_ONCE:
            write_dot(
                self.module, f"many_{tokens}", rows=self._dense_rows(), target=self.target, tokens=tokens
            )

    def _dense_rows(self) -> Rows:
        if self.is_direct:
            return PairRows(self.matrix)
        if self.many.unit == "pairs":
            return PairRows(Matrix(0, "bfloat16", self.matrix.rows, self.many.padded))
        panel = replace(self.matrix, offset=0, encoding="float32", cols=self.many.padded, scales=None)
        return PlainRows(panel, DECODERS["float32"])


def _is_direct(form: ExpertForm, matrix: Matrix, target: Target) -> bool:
    """Plain bfloat16 in whole blocks, and for tiles whole groups of rows, which end where memory may."""
    if target.many == "float32" or matrix.encoding != "bfloat16" or form.packed_elements:
        return False
    is_in_blocks = matrix.cols % (2 * target.lanes) == 0
    return is_in_blocks and (target.many == "pairs" or (matrix.rows // 2) % TILE == 0)
