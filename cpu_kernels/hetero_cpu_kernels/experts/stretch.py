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
    """Of all experts in tiles before this one."""
    all_costs: int
    """Of all experts in tiles."""
    units_before: int
    """Of the stretch, in experts before this one."""


@_jit
def _cut(total, grain, part, whole):
    """So much of `total` as `part` is of `whole`, in multiples of `grain`."""
    units = (total + grain - 1) // grain
    return min(total, units * part // whole * grain)


@_jit
def share(total, grain, index, count):
    """First and end of a worker's part of `total`, in multiples of `grain`."""
    return _cut(total, grain, index, count), _cut(total, grain, index + 1, count)


@_jit
def _num_tokens(plan, expert):
    bounds = carray(pointer(plan.bounds_at), plan.num_experts + 1, np.int64)
    return bounds[expert + 1] - bounds[expert]


@_jit
def is_tiled(plan, expert):
    """Whether its tokens are multiplied in tiles."""
    return is_in_tiles(plan.up.many) and _num_tokens(plan, expert) > plan.few_tokens


@_jit
def run_rows(plan, expert):
    """Rows at a time, at most: so few that a second block of tokens finds them in the cache."""
    return FEW_RUN if _num_tokens(plan, expert) <= min(4, plan.few_tokens) else MANY_RUN


@_jit
def _cost(plan, expert):
    """Of 32 rows of one expert: of reading them, and of products in tiles."""
    if is_tiled(plan, expert):
        return _READING_COST + in_sixteens(_num_tokens(plan, expert))
    return _READING_COST


@_jit
def _runs_cost(plan, expert):
    """Of all rows of an expert in tiles; others are not shared by cost."""
    return (plan.inner + MANY_RUN - 1) // MANY_RUN * _cost(plan, expert) if is_tiled(plan, expert) else 0


@_jit
def _grain(plan, expert):
    """Rows that stay together."""
    if is_tiled(plan, expert):
        return MANY_RUN
    return 16 if _num_tokens(plan, expert) > plan.few_tokens else 1


@_jit
def _part(plan, owner, count, expert, costs):
    """Outputs of the gate in a worker's stretch: of every expert a part, and not the same one each time.

    Experts in tiles follow each other, and a worker has one stretch of them, so that it reads the activations
    of a few experts only. `costs`: of what comes before this expert, and of all.
    """
    if not is_tiled(plan, expert):
        return share(plan.inner, _grain(plan, expert), (owner + expert) % count, count)
    cost, runs = _cost(plan, expert), (plan.inner + MANY_RUN - 1) // MANY_RUN
    first = (costs[1] * owner // count - costs[0] + cost - 1) // cost
    end = (costs[1] * (owner + 1) // count - costs[0] + cost - 1) // cost
    return MANY_RUN * min(max(first, 0), runs), min(plan.inner, MANY_RUN * min(max(end, 0), runs))


@_jit
def _num_units(plan, count, place):
    """Of the part where `place` is."""
    if place.first == place.end:
        return 0
    size = run_rows(plan, place.expert)
    if size == FEW_RUN:
        size = min(FEW_RUN, max(_FEW_UNIT, plan.num_experts * plan.inner // (count * _UNITS)))
    return (place.end - place.first + size - 1) // size


@_jit
def _unit(plan, count, place, number):
    """First output and number of outputs of a unit of the part where `place` is."""
    units = _num_units(plan, count, place)
    begin, end = share(place.end - place.first, _grain(plan, place.expert), number, units)
    return place.first + begin, end - begin


@_jit
def _moved(plan, count, place):
    """From `place` to the owner's part of the next expert."""
    units = place.units_before + _num_units(plan, count, place)
    costs = place.cost_before + _runs_cost(plan, place.expert), place.all_costs
    return _placed(plan, count, (place.owner, place.num_owners), place.expert + 1, (costs, units))


@_jit
def _placed(plan, count, owner, expert, before):
    """`owner`: and stretches looked at. `before` the expert: costs, as `_part` takes them, and units."""
    costs, units = before
    first, end = 0, 0
    if expert < plan.num_experts:
        first, end = _part(plan, owner[0], count, expert, costs)
    return Place(owner[0], owner[1], expert, first, end, costs[0], costs[1], units)


@_jit
def counters_at(plan, worker):
    """Where a worker's counters lie: at the end of its scratch."""
    return plan.scratch_at + (worker + 1) * plan.scratch_bytes - COUNTER_BYTES


@_jit
def _beginning(plan, index, count):
    """The first expert's part of a worker's own stretch, which may have no rows."""
    total = 0
    for expert in range(plan.num_experts):
        total += _runs_cost(plan, expert)
    return _placed(plan, count, (index, 1), 0, ((0, total), 0))


@_jit
def open_stretch(plan, index, count):
    """Before the workers meet: how much there is to take of this worker's."""
    place = _beginning(plan, index, count)
    while place.expert < plan.num_experts:
        place = _moved(plan, count, place)
    at = counters_at(plan, index)
    store_word(at + UNITS, place.units_before)
    store_word(at + TAKEN, 0)
    store_word(at + DONE, 0)


@_jit
def first_place(plan, index, count):
    """The beginning of a worker's own stretch."""
    place = _beginning(plan, index, count)
    while place.expert < plan.num_experts and place.first == place.end:
        place = _moved(plan, count, place)
    return place


@_jit
def take(plan, count, place):
    """The next unit: where it is, its first output of the gate and how many; 0 when nobody has any left."""
    while True:
        at = counters_at(plan, place.owner)
        units = load_word(at + UNITS)
        if load_word(at + TAKEN) < units:
            number = add_to_word(at + TAKEN, 1)
            if number < units:
                while number >= place.units_before + _num_units(plan, count, place):
                    place = _moved(plan, count, place)
                begin, rows = _unit(plan, count, place, number - place.units_before)
                return place, begin, rows
        if place.num_owners == count:
            return place, 0, 0
        owner = (place.owner + 1) % count, place.num_owners + 1
        place = _placed(plan, count, owner, 0, ((0, place.all_costs), 0))


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
    even = total + 1  # for every worker alike, and something where nothing was done
    whole = count * (total + even)
    begin = count * before + index * even
    grain = 16 if plan.has_many else 1
    return (
        _cut(plan.hidden, grain, begin, whole),
        _cut(plan.hidden, grain, begin + count * own + even, whole),
    )
