"""Rows of one matrix times the tokens of one expert: which kernel, and what the kernels leave to do.

A bias is added afterwards; so are the escapes of a packed record, which the kernels read as zeros.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"
# mypy: disable-error-code="call-arg, attr-defined, var-annotated"

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import carray

from hetero_cpu_kernels.addresses import call_kernel, float_of, pointer
from hetero_cpu_kernels.experts.activation_memory import read_activation
from hetero_cpu_kernels.experts.inner_jit import inner_jit as _jit
from hetero_cpu_kernels.experts.packing import CHUNK_ELEMENTS
from hetero_cpu_kernels.experts.plan import MANY_RUN
from hetero_cpu_kernels.experts.tile_job import in_sixteens, multiply_tiles


class Task(NamedTuple):
    """Some rows of a matrix for one expert's tokens.

    Row `begin + r` for token t goes to float32 number `t * stride + r` behind `results_at`; in tiles as
    `tile_job` says.
    """

    record: int
    """Address of the expert's record."""
    first_pair: int
    num_tokens: int
    is_many: bool
    is_tiled: bool
    begin: int
    rows: int
    next_record: int
    """What this worker reads next: a record, and a row of the same matrix in it."""
    next_begin: int
    next_rows: int
    """How many of them, up to a panel's; 0 where nothing is known to come."""
    results_at: int
    stride: int
    arguments_at: int
    """Of this worker's scratch: where a kernel's arguments are put."""
    outputs_at: int
    """Of this worker's scratch: one token's gated outputs."""
    panel_at: int
    """Of this worker's scratch: decoded rows."""


@_jit
def project(matrix, task):
    """Compute the rows, bias and escapes included. `matrix`: a `plan.PROJECTION`."""
    if task.is_tiled:
        multiply_tiles(matrix, task)
    elif task.is_many:
        for start in range(0, task.rows, MANY_RUN):
            _multiply_many(matrix, task, start, min(MANY_RUN, task.rows - start))
    else:
        _multiply_few(matrix, task)
    if matrix.bias_offset >= 0:
        _add_bias(matrix, task)
    if matrix.is_packed:
        _add_escapes(matrix, task)


@_jit
def _multiply_few(matrix, task):
    """Blocks of tokens times the record's rows."""
    arguments = carray(pointer(task.arguments_at), 8, np.int64)
    arguments[0], arguments[1], arguments[2] = task.record, task.begin, task.begin + task.rows
    arguments[6], arguments[7] = task.next_record, task.next_begin
    table = _address_table(matrix.few, task)
    token = 0
    while token < task.num_tokens:
        left = task.num_tokens - token
        kernel, taken = matrix.few_1, 1
        if left >= 4:
            kernel, taken = matrix.few_4, 4
        elif left >= 2:
            kernel, taken = matrix.few_2, 2
        _multiply_block(arguments, kernel, task, table + 8 * token, task.results_at + 4 * token * task.stride)
        token += taken


@_jit
def _multiply_block(arguments, kernel, task, table_at, results_at):
    arguments[3] = table_at
    arguments[4] = results_at
    arguments[5] = 4 * task.stride
    call_kernel(kernel, task.arguments_at)


@_jit
def _address_table(layout, task):
    """Addresses of the activations of a task's tokens, at the end of the arguments' page."""
    rows = carray(pointer(layout.rows_at), task.first_pair + task.num_tokens, np.int64)
    table_at = task.arguments_at + 64
    table = carray(pointer(table_at), task.num_tokens, np.int64)
    for t in range(task.num_tokens):
        table[t] = layout.at + rows[task.first_pair + t] * layout.row_bytes + layout.read_at
    return table_at


@_jit
def _multiply_many(matrix, task, start, rows):
    """`rows` rows from `begin + start` on, decoded once unless they can be used as they lie."""
    arguments = carray(pointer(task.arguments_at), 8, np.int64)
    first = task.begin + start
    weights = task.record
    if not matrix.is_direct:
        arguments[0], arguments[1], arguments[2] = task.record, first, first + rows
        arguments[3] = task.panel_at
        call_kernel(matrix.panel, task.arguments_at)
        weights, first = task.panel_at, 0
    arguments[0] = arguments[6] = weights
    arguments[1] = arguments[7] = first
    arguments[2] = first + rows
    table = _address_table(matrix.many, task)
    token = 0
    while token < task.num_tokens:
        left = task.num_tokens - token
        kernel, taken = matrix.many_1, 1
        if left >= 4:
            kernel, taken = matrix.many_4, 4
        elif left >= 2:
            kernel, taken = matrix.many_2, 2
        results_at = task.results_at + 4 * (token * task.stride + start)
        _multiply_block(arguments, kernel, task, table + 8 * token, results_at)
        token += taken


@_jit
def _results(task):
    """A task's results, flat."""
    if task.is_tiled:
        return carray(pointer(task.results_at), in_sixteens(task.num_tokens) * task.stride, np.float32)
    return carray(pointer(task.results_at), (task.num_tokens - 1) * task.stride + task.rows, np.float32)


@_jit
def _number(task, token, row):
    """Which of the results a token's row is."""
    if task.is_tiled:
        return (token >> 4) * task.stride + 16 * row + (token & 15)
    return token * task.stride + row


@_jit
def _add_bias(matrix, task):
    results = _results(task)
    bias_at = task.record + matrix.bias_offset
    for r in range(task.rows):
        value = _float_number(bias_at, matrix.bias_encoding, task.begin + r)
        for t in range(task.num_tokens):
            results[_number(task, t, r)] += value


@_jit
def _float_number(address, encoding, number):
    """Element `number` of an array of floats. Encodings: 0 float32, 1 float16, 2 bfloat16."""
    if encoding == 0:
        return carray(pointer(address + 4 * number), 1, np.float32)[0]
    half = carray(pointer(address + 2 * number), 1, np.uint16)[0]
    if encoding == 2:
        return float_of(np.uint32(np.uint32(half) << np.uint32(16)))
    exponent, mantissa = (half >> 10) & 31, np.float32(half & 1023)
    if exponent == 0:
        size = mantissa * np.float32(2.0**-24)
    else:
        size = (np.float32(1024) + mantissa) * np.float32(2.0) ** np.float32(exponent - 25)
    return -size if half >> 15 else size


@_jit
def _add_escapes(matrix, task):
    """Elements that a packed record keeps in its list, in ascending order. `packing` has the format."""
    layout = matrix.many if task.is_many else matrix.few
    table = task.record + matrix.table_at
    begin = matrix.first_element + task.begin * matrix.cols
    end = begin + task.rows * matrix.cols
    results = _results(task)
    row = 0
    for chunk in range(begin // CHUNK_ELEMENTS, (end - 1) // CHUNK_ELEMENTS + 1):
        bounds = carray(pointer(table + 4 * chunk), 2, np.uint32)
        first, last = np.int64(bounds[0] >> np.uint32(8)), np.int64(bounds[1] >> np.uint32(8))
        escapes = carray(pointer(task.record + matrix.escapes_at), last, np.uint32)
        for number in range(first, last):
            element = chunk * CHUNK_ELEMENTS + np.int64(escapes[number] >> np.uint32(16)) - begin
            if element < 0 or element >= end - begin:
                continue
            while element >= (row + 1) * matrix.cols:
                row += 1
            weight = float_of(np.uint32(escapes[number] << np.uint32(16)))
            for t in range(task.num_tokens):
                x = read_activation(layout, task.first_pair + t, element - row * matrix.cols)
                results[_number(task, t, row)] += weight * x
