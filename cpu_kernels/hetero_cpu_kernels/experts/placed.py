"""One matrix of a form, ready to be called: its machine code, and memory for its inputs."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import numpy.typing as npt

from hetero_cpu_kernels.experts.activations import TILE, UNIT_CODES, Layout
from hetero_cpu_kernels.experts.form import ExpertForm, Matrix
from hetero_cpu_kernels.experts.native import NativeCode
from hetero_cpu_kernels.experts.packing import Packing
from hetero_cpu_kernels.experts.plan import FLOAT_CODES, address_of
from hetero_cpu_kernels.experts.program import TOKENS_AT_ONCE, Program
from hetero_cpu_kernels.experts.targets import Target

ALIGN_BYTES = 64


@functools.cache
def _compiled(form: ExpertForm, matrix: Matrix, target: Target) -> tuple[Program, NativeCode]:
    """Compiled once a process: layers of one model share their form."""
    program = Program.write(form, matrix, target=target)
    return program, program.compile()


class PlacedProjection:
    """The code of one matrix, and its inputs in memory of their own."""

    def __init__(self, form: ExpertForm, matrix: Matrix, *, target: Target) -> None:
        self._form = form
        self.program, self._code = _compiled(form, matrix, target)
        self.few = Inputs(self.program.few)
        self.many = Inputs(self.program.many)

    def write(self, record: Any) -> None:
        """Write what never changes of a `plan.PROJECTION`."""
        matrix, program = self.program.matrix, self.program
        for number in TOKENS_AT_ONCE:
            record[f"few_{number}"] = self._code.address(f"few_{number}")
            record[f"many_{number}"] = self._code.address(f"many_{number}")
        for name in ("panel", "tiles", "tiles_on_the_way", "digits", "inputs", "gate", "add"):
            record[name] = self._code.address(name)
        record["on_the_way_groups"] = program.on_the_way_groups
        record["rows"], record["cols"] = matrix.rows, matrix.cols
        record["is_direct"], record["offset"] = program.is_direct, matrix.offset
        record["row_bytes"] = matrix.row_bytes
        record["bias_offset"] = -1 if matrix.bias is None else matrix.bias.offset
        record["bias_encoding"] = 0 if matrix.bias is None else FLOAT_CODES[matrix.bias.encoding]
        record["is_packed"] = self._form.packed_elements > 0
        if self._form.packed_elements:
            packing = Packing(self._form.packed_elements)
            record["first_element"] = matrix.offset // 2
            record["table_at"], record["escapes_at"] = packing.table_at, packing.escapes_at
        self.few.write(record["few"])
        self.many.write(record["many"])


class Inputs:
    """Memory for activations in one layout."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._memory = np.empty(0, dtype=np.uint8)
        self._at = 0
        self._row_bytes = layout.row_bytes
        self._order, self._place = layout.order, layout.place

    def write(self, record: Any) -> None:
        """Write what never changes of a `plan.LAYOUT`."""
        layout = self._layout
        record["unit"] = UNIT_CODES[layout.unit]
        record["order_at"], record["place_at"] = address_of(self._order), address_of(self._place)
        record["block"], record["padded"] = layout.order.size, layout.padded
        record["row_bytes"], record["read_at"] = layout.row_bytes, layout.digits_at
        record["panel_row_bytes"] = layout.panel_row_bytes

    def reserve(self, num_rows: int) -> int:
        """Address of memory for so many rows, and for the rest of a tile; good until the next call."""
        needed = (num_rows + TILE) * self._row_bytes + ALIGN_BYTES
        if needed > self._memory.size:
            self._memory = np.zeros(needed + needed // 2, dtype=np.uint8)
            self._at = aligned(self._memory)
        return self._at


def aligned(memory: npt.NDArray[np.uint8]) -> int:
    """Address of the first cache line in memory."""
    return -(-address_of(memory) // ALIGN_BYTES) * ALIGN_BYTES
