"""Experts of many tokens in tiles: their inputs, their products, the gate, and what is added to the output.

Results stay in tiles from the product to the output: [token groups, rows, 16 tokens] float32. So of a task's
row r and token t the number is `(t // 16) * stride + 16 * r + t % 16`. Rows that fill a tile up are zeros.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"
# mypy: disable-error-code="call-arg, attr-defined, var-annotated"

from __future__ import annotations

import numpy as np
from numba import carray

from hetero_cpu_kernels.addresses import call_kernel, pointer
from hetero_cpu_kernels.experts.activation_memory import pack
from hetero_cpu_kernels.experts.inner_jit import inner_jit as _jit
from hetero_cpu_kernels.experts.meeting import place_of
from hetero_cpu_kernels.experts.plan import MANY_RUN


@_jit
def in_sixteens(number):
    """How many groups of 16 so many tokens or rows are."""
    return (number + 15) >> 4


@_jit
def pack_tiles(plan, index, count, are_outputs):
    """This worker's groups of 16 tokens of experts that have many: inputs, or digits of gates' outputs."""
    bounds = carray(pointer(plan.bounds_at), plan.num_experts + 1, np.int64)
    unit = 0
    for expert in range(plan.num_experts):
        if bounds[expert + 1] - bounds[expert] <= plan.few_tokens:
            continue
        for first in range(bounds[expert], bounds[expert + 1], 16):
            if unit % count == index and are_outputs:
                _pack_outputs(plan, index, first)
            elif unit % count == index:
                _pack_group(plan, index, first, bounds[expert + 1])
            unit += 1


@_jit
def _pack_outputs(plan, index, first):
    """Digits of the group of 16 pairs from `first` on."""
    many = plan.down.many
    arguments_at = plan.scratch_at + index * plan.scratch_bytes
    arguments = carray(pointer(arguments_at), 2, np.int64)
    arguments[0] = _row_at(many, first)
    arguments[1] = arguments[0] + many.read_at
    call_kernel(plan.down.inputs, arguments_at)


@_jit
def _row_at(layout, pair):
    """Where the row that a pair reads begins: of its group's first pair, where the group does."""
    row = carray(pointer(layout.rows_at), pair + 1, np.int64)[pair]
    return layout.at + row * layout.row_bytes


@_jit
def _pack_group(plan, index, first, end):
    """16 pairs from `first` on, as far as `end`: the last one stands for what is missing."""
    many = plan.up.many
    tokens = carray(pointer(plan.tokens_at), plan.num_pairs, np.int64)
    arguments_at = plan.scratch_at + index * plan.scratch_bytes
    arguments = carray(pointer(arguments_at), 8 + 16, np.int64)
    for i in range(16):
        arguments[8 + i] = plan.hidden_at + 4 * plan.hidden * tokens[min(first + i, end - 1)]
    arguments[0], arguments[1] = arguments_at + 64, _row_at(many, first) + many.read_at
    call_kernel(plan.up.inputs, arguments_at)
    if plan.hidden % many.block:
        row = carray(pointer(many.rows_at), plan.num_pairs, np.int64)[first]
        hidden = carray(pointer(plan.hidden_at), plan.num_tokens * plan.hidden, np.float32)
        for i in range(16):
            token = tokens[min(first + i, end - 1)]
            pack(many, hidden, plan.hidden, token, row + i, plan.hidden // many.block)


@_jit
def multiply_tiles(matrix, task):
    """A task's rows, 32 at a time: as they lie, or through a panel."""
    arguments = carray(pointer(task.arguments_at), 12, np.int64)
    groups = task.stride >> 8
    for group in range(0, groups, MANY_RUN // 16):
        count = min(MANY_RUN // 16, groups - group)
        first = 16 * group
        rows = max(0, min(16 * count, task.rows - first))
        kernel = matrix.tiles_on_the_way
        if rows < 16 * count or in_sixteens(task.num_tokens) > matrix.on_the_way_groups:
            kernel = matrix.tiles
            _write_panel(matrix, task, first, rows, count)
            arguments[0] = task.panel_at
        else:
            arguments[0], arguments[8], arguments[9] = task.record, task.begin + first, task.panel_at
        arguments[1] = count
        arguments[2] = _row_at(matrix.many, task.first_pair) + matrix.many.read_at
        arguments[3] = in_sixteens(task.num_tokens)
        arguments[4], arguments[5] = task.results_at + 64 * first, 4 * task.stride
        _write_what_comes_next(matrix, task, first + rows)
        call_kernel(kernel, task.arguments_at)


@_jit
def _write_panel(matrix, task, first, rows, groups):
    """Rows of a task from `first` on; zeros fill the last group up."""
    if rows < 16 * groups:
        carray(pointer(task.panel_at), 16 * groups * matrix.many.panel_row_bytes, np.uint8)[:] = 0
    arguments = carray(pointer(task.arguments_at), 4, np.int64)
    arguments[0], arguments[1] = task.record, task.begin + first
    arguments[2], arguments[3] = task.begin + first + rows, task.panel_at
    call_kernel(matrix.panel, task.arguments_at)


@_jit
def _write_what_comes_next(matrix, task, row):
    """Which weights are read after the first `row` rows of a task, and where they lie (`place_of`)."""
    record, begin, rows = task.next_record, task.next_begin, task.next_rows
    if row < task.rows:
        record, begin, rows = task.record, task.begin + row, min(MANY_RUN, task.rows - row)
    place, row_bytes = place_of(matrix, record, begin)
    arguments = carray(pointer(task.arguments_at), 12, np.int64)
    arguments[6], arguments[7] = place, rows * row_bytes
    arguments[10], arguments[11] = record, begin


@_jit
def gate_strides(plan, task):
    """Of results of gate and up: floats from 16 tokens to the next, and from the gate's to those of up."""
    if plan.is_interleaved:
        return 512 * in_sixteens(task.rows), 16
    stride = 256 * in_sixteens(task.rows)
    return stride, stride * in_sixteens(task.num_tokens)


@_jit
def gate_tiles(plan, task):
    """Results of gate and up to the inputs of the down projection."""
    many = plan.down.many
    stride, offset = gate_strides(plan, task)
    arguments = carray(pointer(task.arguments_at), 8, np.int64)
    for group in range(in_sixteens(task.num_tokens)):
        results_at = task.results_at + 4 * stride * group
        arguments[0], arguments[1] = results_at, results_at + 4 * offset
        arguments[2] = 128 if plan.is_interleaved else 64
        arguments[3] = in_sixteens(task.rows)
        arguments[4] = _row_at(many, task.first_pair) + 16 * group * many.row_bytes
        arguments[5] = task.begin
        call_kernel(plan.down.gate, task.arguments_at)


@_jit
def add_tiles(plan, task, out):
    """Add a task's results to its columns of the output."""
    tokens = carray(pointer(plan.tokens_at), plan.num_pairs, np.int64)
    weights = carray(pointer(plan.weights_at), plan.num_pairs, np.float32)
    arguments = carray(pointer(task.arguments_at), 8, np.int64)
    full = task.rows >> 4
    for group in range(in_sixteens(task.num_tokens)):
        first, results_at = task.first_pair + 16 * group, task.results_at + 4 * task.stride * group
        num_tokens = min(16, task.num_tokens - 16 * group)
        results = carray(pointer(results_at), task.stride, np.float32)
        for r in range(16 * full, task.rows):
            for t in range(num_tokens):
                value = results[16 * r + t]
                out[tokens[first + t], task.begin + r] += weights[first + t] * value
        arguments[0], arguments[1] = results_at, full
        arguments[2], arguments[3] = plan.tokens_at + 8 * first, plan.weights_at + 4 * first
        arguments[4] = num_tokens
        arguments[5], arguments[6] = plan.out_at + 4 * task.begin, 4 * plan.hidden
        call_kernel(plan.down.add, task.arguments_at)
