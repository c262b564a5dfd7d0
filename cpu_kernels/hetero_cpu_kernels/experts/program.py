"""The compiled kernels of one matrix for one target, and the layouts that their activations have."""

from __future__ import annotations

from dataclasses import dataclass, replace

from llvmlite import ir

from hetero_cpu_kernels.experts.activations import Layout
from hetero_cpu_kernels.experts.byte_tiles import multiplies_byte_tiles, write_byte_tiles
from hetero_cpu_kernels.experts.digit_tiles import (
    write_digits_of_outputs,
    write_digits_of_rows,
    write_float_gate,
)
from hetero_cpu_kernels.experts.digits import write_digits
from hetero_cpu_kernels.experts.dot import write_dot
from hetero_cpu_kernels.experts.encodings import DECODERS
from hetero_cpu_kernels.experts.form import ExpertForm, Matrix
from hetero_cpu_kernels.experts.integer_dot import write_integer_dot
from hetero_cpu_kernels.experts.integer_rows import IntegerRows, integer_rows_of
from hetero_cpu_kernels.experts.looked_up_rows import looked_up_rows_of
from hetero_cpu_kernels.experts.native import NativeCode
from hetero_cpu_kernels.experts.panel import write_panel
from hetero_cpu_kernels.experts.rows import PairRows, PlainRows, Rows, rows_of
from hetero_cpu_kernels.experts.targets import Target
from hetero_cpu_kernels.experts.tile_values import write_add, write_gate, write_inputs
from hetero_cpu_kernels.experts.tile_weights import (
    ByteWeights,
    DecodedWeights,
    PanelWeights,
    Weights,
    on_the_way,
)
from hetero_cpu_kernels.experts.tiles import write_tiles

TOKENS_AT_ONCE = (1, 2, 4)
"""Tokens that one kernel takes side by side."""
_DECODED_GROUPS = 2
"""Groups of 16 tokens that meet weights which are decoded on the way: as many as one product takes."""
_ANY_GROUPS = 1 << 30
"""Of tokens that meet the record's own bfloat16."""


@dataclass(frozen=True)
class Program:
    """What is compiled for one matrix, before it is.

    few_1, few_2, few_4      weights decoded on the way, or multiplied as integers, so many tokens
    digits                   activations for the latter
    panel                    a few rows decoded for all tokens of an expert
    many_1, many_2, many_4   rows of a panel (or of the record, where `is_direct`), so many tokens
    tiles                    the same with tiles, instead of many_*
    tiles_on_the_way         the same without a panel, or the only ones: of bytes
    inputs                   activations for tiles: of the up projection, and of the down projection's digits
    gate, add                for tiles: activations of the down projection, sums of its results
    """

    matrix: Matrix
    target: Target
    module: ir.Module
    few: Layout
    many: Layout
    is_direct: bool
    """Whether many tokens read the record's own bfloat16, undecoded."""
    on_the_way: type[Weights] | None
    """How tiles are made of a record without a panel; None without tiles, or where they cannot be."""

    @property
    def on_the_way_groups(self) -> int:
        """Groups of 16 tokens, at most, that need no panel: decoding again would cost more."""
        if self.on_the_way is DecodedWeights:
            return _DECODED_GROUPS
        return _ANY_GROUPS if self.on_the_way else 0

    @classmethod
    def write(cls, form: ExpertForm, matrix: Matrix, *, target: Target) -> Program:
        """Raises ValueError for a matrix that the kernels cannot read."""
        rows = looked_up_rows_of(matrix, target) or rows_of(form, matrix)
        integer_rows = integer_rows_of(matrix, target)
        many_rows = PairRows(matrix) if _is_in_pairs(form, matrix, target) else rows
        many, tiles_from = _many_of(form, many_rows, target)
        program = cls(
            matrix,
            target,
            ir.Module(),
            few=(
                Layout.of_digits(integer_rows, target.lanes)
                if integer_rows
                else Layout.of(rows, target.lanes, unit="float32")
            ),
            many=many,
            is_direct=many_rows.is_in_pairs and target.many == "pairs",
            on_the_way=tiles_from,
        )
        if integer_rows:
            program._write_few_integers(integer_rows)
        else:
            program._write_few(rows)
        program._write_many(many_rows)
        if target.many == "tiles":
            program._write_values(form)
        return program

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
        if self.many.unit == "digit_tiles":
            write_byte_tiles(self.module, "tiles_on_the_way", rows=rows, layout=self.many)
            return
        if not self.is_direct:
            write_panel(self.module, "panel", rows=rows, target=self.target, layout=self.many)
        if self.many.unit == "tiles":
            write_tiles(self.module, "tiles", weights=PanelWeights, rows=rows, layout=self.many)
            if self.on_the_way:
                write_tiles(
                    self.module, "tiles_on_the_way", weights=self.on_the_way, rows=rows, layout=self.many
                )
            return
        for tokens in TOKENS_AT_ONCE:
            write_dot(
                self.module, f"many_{tokens}", rows=self._dense_rows(), target=self.target, tokens=tokens
            )

    def _write_values(self, form: ExpertForm) -> None:
        """What brings activations into tiles and results out of them."""
        is_in_digits, is_up = self.many.unit == "digit_tiles", self.matrix == form.up
        if is_up and is_in_digits:
            write_digits_of_rows(self.module, "inputs", layout=self.many)
        elif is_up:
            write_inputs(self.module, "inputs", layout=self.many)
        elif is_in_digits:
            write_float_gate(self.module, "gate", gate=form.gate)
            write_digits_of_outputs(self.module, "inputs", layout=self.many)
        else:
            write_gate(self.module, "gate", gate=form.gate, layout=self.many)
        if not is_up:
            write_add(self.module, "add")

    def _dense_rows(self) -> Rows:
        if self.is_direct:
            return PairRows(self.matrix)
        if self.many.unit == "pairs":
            return PairRows(Matrix(0, "bfloat16", self.matrix.rows, self.many.padded))
        panel = replace(self.matrix, offset=0, encoding="float32", cols=self.many.padded, scales=None)
        return PlainRows(panel, DECODERS["float32"])


def _many_of(form: ExpertForm, rows: Rows, target: Target) -> tuple[Layout, type[Weights] | None]:
    """The layout of many tokens, and where tiles of weights come from without a panel."""
    if multiplies_byte_tiles(rows.matrix, target):
        is_up = rows.matrix == form.up
        return Layout.of_digit_tiles(rows.matrix.cols, has_floats=not is_up), ByteWeights
    layout = Layout.of(rows, target.lanes, unit=target.many)
    return layout, on_the_way(rows, target.lanes) if target.many == "tiles" else None


def _is_in_pairs(form: ExpertForm, matrix: Matrix, target: Target) -> bool:
    """Whether rows are pairs of bfloat16 that the target multiplies as they are: in whole blocks."""
    is_plain = matrix.encoding == "bfloat16" and not form.packed_elements
    return is_plain and target.many != "float32" and matrix.cols % (2 * target.lanes) == 0
