"""Which worker computes which rows: of the up projection its own stretch first, then what others have left.

Cores are not equally fast: one that is far from memory, or shared, needs twice another's time for as many
rows. So a stretch is taken in units. Its worker takes them in order, and whoever has none left takes the next
worker's. A unit is taken by an addition to a counter of its owner, so nobody has it twice; who computes a row
changes none of its bits.

    counters   in each worker's scratch: TAKEN units of its stretch, by whomever   UNITS in it
               DONE: what the worker itself has computed, in costs

The down projection is shared by columns, whose sums one worker makes from first expert to last. What a
worker did of the up projection tells how many columns it gets: half of them by that, half as all the others,
since a core that was slow is slow again, but less so.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"
# mypy: disable-error-code="call-arg, attr-defined, var-annotated"

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import carray

from hetero_cpu_kernels.addresses import add_to_word, load_word, pointer, store_word
from hetero_cpu_kernels.experts.activation_memory import is_in_tiles
from hetero_cpu_kernels.experts.inner_jit import inner_jit as _jit
from hetero_cpu_kernels.experts.plan import COUNTER_BYTES, FEW_RUN, MANY_RUN
from hetero_cpu_kernels.experts.tile_job import in_sixteens

TAKEN, UNITS, DONE = 0, 8, 16
_READING_COST = 8
"""Of rows, in their products with 16 tokens: where workers wait for memory, 5 (int8) to 10 (bfloat16)."""
_FEW_UNIT = 24
"""Rows of a unit where experts have few tokens: some ten microseconds of a worker's memory."""
_UNITS = 32
"""Of a long stretch of such rows: longer units then, since each costs a little."""


class Place(NamedTuple):
    """How far a worker has come: in whose stretch, and in which expert's part of it."""

    owner: int
    num_owners: int
    """Stretches looked at, this one included."""
    expert: int
    first: int
    """Outputs of the gate that the owner has of this expert, and end of them."""
    end: int
    cost_before: int
    """Of all experts before this one."""
    units_before: int
    """Of the stretch, in experts before this one."""


@_jit
def share(total, grain, index, count):
    """First and end of a worker's part of `total`, in multiples of `grain`."""
    units = (total + grain - 1) // grain
    return min(total, units * index // count * grain), min(total, units * (index + 1) // count * grain)


@_jit
def num_tokens_of(plan, expert):
    """Of this call."""
    bounds = carray(pointer(plan.bounds_at), plan.num_experts + 1, np.int64)
    return bounds[expert + 1] - bounds[expert]


@_jit
def _is_tiled(plan, expert):
    return is_in_tiles(plan.up.many) and num_tokens_of(plan, expert) > plan.few_tokens


@_jit
def _cost(plan, expert):
    """Of 32 rows of one expert: of reading them, and of products in tiles."""
    if _is_tiled(plan, expert):
        return _READING_COST + in_sixteens(num_tokens_of(plan, expert))
    return _READING_COST


@_jit
def _runs_cost(plan, expert):
    """Of all rows of an expert in tiles; others are not shared by cost."""
    return (plan.inner + MANY_RUN - 1) // MANY_RUN * _cost(plan, expert) if _is_tiled(plan, expert) else 0


@_jit
def _all_costs(plan):
    total = 0
    for expert in range(plan.num_experts):
        total += _runs_cost(plan, expert)
    return total


@_jit
def _part(plan, owner, count, expert, costs):
    """Outputs of the gate in a worker's stretch: of every expert a part, and not the same one each time.

    Experts in tiles follow each other, and a worker has one stretch of them, so that it reads the activations
    of a few experts only. `costs`: of what comes before this expert, and of all.
    """
    if not _is_tiled(plan, expert):
        grain = 16 if num_tokens_of(plan, expert) > plan.few_tokens else 1
        return share(plan.inner, grain, (owner + expert) % count, count)
    cost, runs = _cost(plan, expert), (plan.inner + MANY_RUN - 1) // MANY_RUN
    first = (costs[1] * owner // count - costs[0] + cost - 1) // cost
    end = (costs[1] * (owner + 1) // count - costs[0] + cost - 1) // cost
    return MANY_RUN * min(max(first, 0), runs), min(plan.inner, MANY_RUN * min(max(end, 0), runs))


@_jit
def _num_units(plan, count, expert, rows):
    """Of so many rows of an expert."""
    size = MANY_RUN
    if num_tokens_of(plan, expert) <= min(4, plan.few_tokens):
        size = min(FEW_RUN, max(_FEW_UNIT, plan.num_experts * plan.inner // (count * _UNITS)))
    return (rows + size - 1) // size


@_jit
def _unit(plan, count, place, number):
    """First output and number of outputs of a unit of the part where `place` is."""
    rows = place.end - place.first
    grain = 1
    if _is_tiled(plan, place.expert):
        grain = MANY_RUN
    elif num_tokens_of(plan, place.expert) > plan.few_tokens:
        grain = 16
    begin, end = share(rows, grain, number, _num_units(plan, count, place.expert, rows))
    return place.first + begin, end - begin


@_jit
def _moved(plan, count, place, total):
    """From `place` to the owner's part of the next expert."""
    units = place.units_before + _num_units(plan, count, place.expert, place.end - place.first)
    before = place.cost_before + _runs_cost(plan, place.expert)
    return _placed(plan, count, (place.owner, place.num_owners), (place.expert + 1, before, units), total)


@_jit
def _placed(plan, count, owner, come, total):
    """`owner`: and stretches looked at. `come`: the expert, costs and units before it."""
    first, end = 0, 0
    if come[0] < plan.num_experts:
        first, end = _part(plan, owner[0], count, come[0], (come[1], total))
    return Place(owner[0], owner[1], come[0], first, end, come[1], come[2])


@_jit
def counters_at(plan, worker):
    """Where a worker's counters lie: at the end of its scratch."""
    return plan.scratch_at + (worker + 1) * plan.scratch_bytes - COUNTER_BYTES


@_jit
def open_stretch(plan, index, count):
    """Before the workers meet: how much there is to take of this worker's."""
    total = _all_costs(plan)
    place = _placed(plan, count, (index, 1), (0, 0, 0), total)
    while place.expert < plan.num_experts:
        place = _moved(plan, count, place, total)
    at = counters_at(plan, index)
    store_word(at + UNITS, place.units_before)
    store_word(at + TAKEN, 0)
    store_word(at + DONE, 0)


@_jit
def first_place(plan, index, count):
    """The beginning of a worker's own stretch."""
    total = _all_costs(plan)
    place = _placed(plan, count, (index, 1), (0, 0, 0), total)
    while place.expert < plan.num_experts and place.first == place.end:
        place = _moved(plan, count, place, total)
    return place


@_jit
def take(plan, count, place):
    """The next unit: where it is, its first output of the gate and how many; 0 when nobody has any left."""
    total = _all_costs(plan)
    while True:
        at = counters_at(plan, place.owner)
        units = load_word(at + UNITS)
        if load_word(at + TAKEN) < units:
            number = add_to_word(at + TAKEN, 1)
            if number < units:
                while number >= place.units_before + _num_units(
                    plan, count, place.expert, place.end - place.first
                ):
                    place = _moved(plan, count, place, total)
                begin, rows = _unit(plan, count, place, number - place.units_before)
                return place, begin, rows
        if place.num_owners == count:
            return place, 0, 0
        owner = (place.owner + 1) % count, place.num_owners + 1
        place = _placed(plan, count, owner, (0, 0, 0), total)


@_jit
def note_done(plan, index, place, rows):
    """This worker has computed so many outputs of the gate."""
    at = counters_at(plan, index) + DONE
    store_word(at, load_word(at) + rows * _cost(plan, place.expert))


@_jit
def down_share(plan, index, count):
    """First column of the output that a worker computes, and end of them.

    All workers agree on it once they have met; before, it is nearly so.
    """
    before, own, total = 0, 0, 0
    for worker in range(count):
        done = load_word(counters_at(plan, worker) + DONE)
        before += done if worker < index else 0
        own += done if worker == index else 0
        total += done
    grain = 16 if plan.has_many else 1
    if total == 0:
        return share(plan.hidden, grain, index, count)
    units, whole = (plan.hidden + grain - 1) // grain, 2 * count * total
    begin = before * count + index * total
    end = begin + own * count + total
    return min(plan.hidden, units * begin // whole * grain), min(plan.hidden, units * end // whole * grain)
