"""The compiled job: one layer's experts, each worker with its share of the rows.

    1  activations into the kernels' layouts          | all workers meet
    2  up projection and gate, rows of I by worker, those of slow ones by others too    | all workers meet
       where tokens are multiplied as digits: of the gate's outputs, by token    | all workers meet
    3  down projection, columns of the output by worker    (`stretch` has both shares)

Every number has one worker that computes it, in an order that does not depend on how many workers there are:
a row's columns from first to last, a token's experts as they are listed. So the bits do not depend on it
either, nor on timing.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"
# mypy: disable-error-code="call-arg, attr-defined, var-annotated"

from __future__ import annotations

import functools

import numpy as np
from numba import carray, cfunc

from hetero_cpu_kernels.addresses import call_kernel, pointer
from hetero_cpu_kernels.experts.activation_memory import is_in_tiles, pack, write_activations
from hetero_cpu_kernels.experts.activations import DIGIT_TILES, DIGITS
from hetero_cpu_kernels.experts.gates import apply_gate
from hetero_cpu_kernels.experts.inner_jit import inner_jit as _jit
from hetero_cpu_kernels.experts.meeting import meet
from hetero_cpu_kernels.experts.plan import ARGUMENT_BYTES, FEW_RUN, MANY_RUN, PLAN
from hetero_cpu_kernels.experts.project import Task, project
from hetero_cpu_kernels.experts.stretch import (
    down_share,
    first_place,
    is_tiled,
    note_done,
    open_stretch,
    run_rows,
    share,
    take,
)
from hetero_cpu_kernels.experts.tile_job import (
    add_tiles,
    gate_strides,
    gate_tiles,
    in_sixteens,
    pack_tiles,
)

ABANDONED = 1
"""Status of a worker that another's failure set free."""


@_jit
def _pack(plan, index, count):
    hidden = carray(pointer(plan.hidden_at), plan.num_tokens * plan.hidden, np.float32)
    few, many = plan.up.few, plan.up.many
    if plan.has_few and few.unit == DIGITS:
        for token in range(*share(plan.num_tokens, 1, index, count)):
            _write_digits(plan, index, plan.up, plan.hidden_at + 4 * token * plan.hidden, token)
    elif plan.has_few:
        blocks = few.padded // few.block
        for unit in range(*share(plan.num_tokens * blocks, 1, index, count)):
            pack(few, hidden, plan.hidden, unit // blocks, unit // blocks, unit % blocks)
    if not plan.has_many:
        return
    blocks = (many.padded + many.block - 1) // many.block
    if is_in_tiles(many):
        pack_tiles(plan, index, count, False)
    else:
        for unit in range(*share(plan.num_tokens * blocks, 1, index, count)):
            pack(many, hidden, plan.hidden, unit // blocks, unit // blocks, unit % blocks)


@_jit
def _write_digits(plan, index, matrix, source, row):
    """The digits of one row of `matrix.few`, of the float32 values at an address, by worker `index`."""
    arguments_at = plan.scratch_at + index * plan.scratch_bytes
    arguments = carray(pointer(arguments_at), 2, np.int64)
    arguments[0] = source
    arguments[1] = matrix.few.at + row * matrix.few.row_bytes + matrix.few.read_at
    call_kernel(matrix.digits, arguments_at)


@_jit
def _are_outputs_packed(plan):
    """Whether digits are made of some outputs of the gate."""
    return (plan.has_few and plan.down.few.unit == DIGITS) or (
        plan.has_many and plan.down.many.unit == DIGIT_TILES
    )


@_jit
def _pack_outputs(plan, index, count):
    """Digits of the gate's outputs: a row by one worker, or 16 together."""
    if plan.has_many and plan.down.many.unit == DIGIT_TILES:
        pack_tiles(plan, index, count, True)
    if not plan.has_few or plan.down.few.unit != DIGITS:
        return
    bounds = carray(pointer(plan.bounds_at), plan.num_experts + 1, np.int64)
    few = plan.down.few
    for expert in range(plan.num_experts):
        if bounds[expert + 1] - bounds[expert] > plan.few_tokens:
            continue
        for pair in range(bounds[expert], bounds[expert + 1]):
            if pair % count == index:
                _write_digits(plan, index, plan.down, few.at + pair * few.row_bytes, pair)


@_jit
def _task(plan, index, expert, begin, rows, following):
    """Rows `begin` to `begin + rows` of one expert's matrix, by worker `index`.

    `following`: the expert and the row that it reads next, and how many.
    """
    bounds = carray(pointer(plan.bounds_at), plan.num_experts + 1, np.int64)
    records = carray(pointer(plan.records_at), plan.num_experts, np.int64)
    scratch = plan.scratch_at + index * plan.scratch_bytes
    outputs = scratch + ARGUMENT_BYTES
    results = outputs + 4 * FEW_RUN
    num_tokens = bounds[expert + 1] - bounds[expert]
    has_tiles = is_tiled(plan, expert)
    return Task(
        record=records[expert],
        first_pair=bounds[expert],
        num_tokens=num_tokens,
        is_many=num_tokens > plan.few_tokens,
        is_tiled=has_tiles,
        begin=begin,
        rows=rows,
        next_record=records[following[0]],
        next_begin=following[1],
        next_rows=following[2],
        results_at=results,
        stride=256 * in_sixteens(rows) if has_tiles else rows,
        arguments_at=scratch,
        outputs_at=outputs,
        panel_at=results + 4 * plan.results,
    )


@_jit
def _beside(task, begin, rows, place, following):
    """The same with other rows.

    `place`: the stride of their results, and floats in front of the first. `following`: the record and the
    row that are read next, and how many.
    """
    return Task(
        record=task.record,
        first_pair=task.first_pair,
        num_tokens=task.num_tokens,
        is_many=task.is_many,
        is_tiled=task.is_tiled,
        begin=begin,
        rows=rows,
        next_record=following[0],
        next_begin=following[1],
        next_rows=following[2],
        results_at=task.results_at + 4 * place[1],
        stride=place[0],
        arguments_at=task.arguments_at,
        outputs_at=task.outputs_at,
        panel_at=task.panel_at,
    )


@_jit
def _run_up(plan, index, count):
    """Gate outputs of this worker's stretch, then of others'; a unit is taken while the one before waits."""
    place, begin, rows = take(plan, count, first_place(plan, index, count))
    while rows > 0:
        following, next_begin, next_rows = take(plan, count, place)
        after = place.expert, begin, 0
        if next_rows > 0:
            after = following.expert, next_begin, min(MANY_RUN, next_rows)
        task = _task(plan, index, place.expert, begin, rows, after)
        _run_gate_rows(plan, task)
        _activate(plan, task)
        note_done(plan, index, place, rows)
        place, begin, rows = following, next_begin, next_rows


@_jit
def _first_gate_rows(plan, index, count):
    """The expert, first row and end of what this worker reads first of the up projection."""
    place = first_place(plan, index, count)
    if plan.is_interleaved:
        return place.expert, 2 * place.first, 2 * place.end
    return place.expert, place.first, place.end


@_jit
def _run_gate_rows(plan, task):
    """Rows of gate and up for a task's outputs."""
    begin, rows = task.begin, task.rows
    stride, offset = 2 * rows, rows
    if task.is_tiled:
        stride, offset = gate_strides(plan, task)
    if plan.is_interleaved:
        after = task.next_record, 2 * task.next_begin, 2 * task.next_rows
        project(plan.up, _beside(task, 2 * begin, 2 * rows, (stride, 0), after))
    else:
        up_begin = plan.inner + begin
        project(plan.up, _beside(task, begin, rows, (stride, 0), (task.record, up_begin, rows)))
        after = task.next_record, task.next_begin, task.next_rows
        project(plan.up, _beside(task, up_begin, rows, (stride, offset), after))


@_jit
def _activate(plan, task):
    """Gate and up of a task's rows, `[tokens, 2 * rows]`, to the inputs of the down projection."""
    if task.is_tiled:
        gate_tiles(plan, task)
        return
    results = carray(pointer(task.results_at), (task.num_tokens, 2 * task.rows), np.float32)
    outputs = carray(pointer(task.outputs_at), task.rows, np.float32)
    for t in range(task.num_tokens):
        apply_gate(plan, results[t], outputs)
        if task.is_many:
            write_activations(plan.down.many, task.first_pair + t, task.begin, outputs)
        else:
            write_activations(plan.down.few, task.first_pair + t, task.begin, outputs)


@_jit
def _first_down_rows(plan, index, count, expert):
    """That expert, or the last one, and the rows that this worker reads of its down projection."""
    first, end = down_share(plan, index, count)
    return (min(expert, plan.num_experts - 1), first, end if plan.num_experts else first)


@_jit
def _run_down(plan, index, count):
    """This worker's columns of the output: every expert's rows, weighted and added in the order listed."""
    out = carray(pointer(plan.out_at), (plan.num_tokens, plan.hidden), np.float32)
    first, end = down_share(plan, index, count)
    for token in range(plan.num_tokens):
        out[token, first:end] = np.float32(0.0)
    for expert in range(plan.num_experts):
        run = run_rows(plan, expert)
        for begin in range(first, end, run):
            rows = min(run, end - begin)
            following = expert, begin + rows, min(run, end - begin - rows)
            if begin + rows == end:
                following = min(expert + 1, plan.num_experts - 1), first, min(MANY_RUN, end - first)
            task = _task(plan, index, expert, begin, rows, following)
            project(plan.down, task)
            _add_weighted(plan, task, out)


@_jit
def _add_weighted(plan, task, out):
    """Add a task's results to its columns of the output."""
    if task.is_tiled:
        add_tiles(plan, task, out)
        return
    tokens = carray(pointer(plan.tokens_at), plan.num_pairs, np.int64)
    weights = carray(pointer(plan.weights_at), plan.num_pairs, np.float32)
    results = carray(pointer(task.results_at), (task.num_tokens, task.rows), np.float32)
    for t in range(task.num_tokens):
        pair = task.first_pair + t
        columns, weight = out[tokens[pair], task.begin : task.begin + task.rows], weights[pair]
        for r in range(task.rows):
            columns[r] += weight * results[t, r]


def _experts_job(plan_at, index, count):
    """`pool.doorbell`'s job for a `PLAN`."""
    plan = carray(pointer(plan_at), 1, PLAN)[0]
    open_stretch(plan, index, count)
    _pack(plan, index, count)
    if not meet(plan, count, plan.up, _first_gate_rows(plan, index, count)):
        return ABANDONED
    _run_up(plan, index, count)
    if not meet(plan, count, plan.down, _first_down_rows(plan, index, count, 0)):
        return ABANDONED
    if _are_outputs_packed(plan):
        _pack_outputs(plan, index, count)
        if not meet(plan, count, plan.down, _first_down_rows(plan, index, count, 1)):
            return ABANDONED
    _run_down(plan, index, count)
    return 0


@functools.cache
def compile_job():
    """The job, compiled; its `address` is good as long as it lives. Takes seconds, once a process."""
    return cfunc("int64(int64, int64, int64)", error_model="numpy")(_experts_job)
