"""Units of work: each is had by one worker, whatever their speeds, and columns follow what was done."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from numba import carray, njit

from hetero_cpu_kernels.addresses import pointer
from hetero_cpu_kernels.experts.activations import TILES
from hetero_cpu_kernels.experts.plan import MANY_RUN, PLAN, address_of
from hetero_cpu_kernels.experts.stretch import (
    DONE,
    Place,
    counters_at,
    down_share,
    first_place,
    note_done,
    open_stretch,
    take,
)

SCRATCH_BYTES = 4096
INNER, HIDDEN = 208, 160
FEW_TOKENS = 8


@njit(nogil=True)
def open_at(plan_at: int, index: int, count: int) -> Place:
    """Open a worker's stretch; where it begins."""
    plan = carray(pointer(plan_at), 1, PLAN)[0]
    open_stretch(plan, index, count)
    place: Place = first_place(plan, index, count)
    return place


@njit(nogil=True)
def take_at(plan_at: int, index: int, count: int, place: Place) -> tuple[Place, int, int]:
    """`take`, and note it as done."""
    plan = carray(pointer(plan_at), 1, PLAN)[0]
    place, begin, rows = take(plan, count, place)
    if rows > 0:
        note_done(plan, index, place, rows)
    return place, begin, rows


@njit(nogil=True)
def columns_at(plan_at: int, index: int, count: int) -> tuple[int, int]:
    """`down_share`."""
    plan = carray(pointer(plan_at), 1, PLAN)[0]
    first, end = down_share(plan, index, count)
    return first, end


@njit(nogil=True)
def counters_of(plan_at: int, index: int) -> int:
    """`counters_at`."""
    return int(counters_at(carray(pointer(plan_at), 1, PLAN)[0], index))


class Job:
    """A plan of experts with so many tokens each, for so many workers."""

    def __init__(self, tokens: list[int], *, count: int, is_tiled: bool) -> None:
        self.count, self.num_experts = count, len(tokens)
        self.bounds = np.cumsum([0, *tokens])
        self.scratch = np.zeros(SCRATCH_BYTES * count, np.uint8)
        self.words = np.zeros(PLAN.itemsize // 8, np.int64)
        plan: Any = self.words.view(PLAN)[0]
        plan["num_experts"], plan["inner"], plan["hidden"] = len(tokens), INNER, HIDDEN
        plan["few_tokens"], plan["has_many"] = FEW_TOKENS, max(tokens, default=0) > FEW_TOKENS
        plan["bounds_at"], plan["scratch_at"] = address_of(self.bounds), address_of(self.scratch)
        plan["scratch_bytes"] = SCRATCH_BYTES
        plan["up"]["many"]["unit"] = TILES if is_tiled else 0
        self.at = address_of(self.words)
        self.places = [open_at(self.at, index, count) for index in range(count)]

    def take_all(self, speeds: list[float], seed: int) -> list[list[tuple[int, int, int]]]:
        """What each worker took, as expert, first output and how many; one's turn is the likelier the faster
        it is."""
        chance, rng = np.array(speeds) / sum(speeds), np.random.default_rng(seed)
        taken: list[list[tuple[int, int, int]]] = [[] for _ in speeds]
        is_done = [False] * self.count
        while not all(is_done):
            worker = int(rng.choice(self.count, p=chance))
            place, begin, rows = take_at(self.at, worker, self.count, self.places[worker])
            self.places[worker] = place
            is_done[worker] = rows == 0
            if rows > 0:
                taken[worker].append((place.expert, begin, rows))
        return taken

    def columns(self) -> list[tuple[int, int]]:
        return [columns_at(self.at, index, self.count) for index in range(self.count)]

    def done(self, worker: int) -> int:
        place = counters_of(self.at, worker) + DONE - address_of(self.scratch)
        return int(self.scratch[place : place + 8].view(np.int64)[0])


CASES = {
    "one token": ([1] * 8, False),
    "a few": ([1, 5, 8, 2], False),
    "many": ([9, 1, 40], False),
    "tiles": ([16, 17, 300, 9] * 4, True),
    "tiles and few": ([1, 16, 3, 200], True),
    "one expert": ([1], True),
}


@pytest.mark.parametrize("count", [1, 2, 5, 15])
@pytest.mark.parametrize(("tokens", "is_tiled"), CASES.values(), ids=CASES)
def test_every_output_is_had_once(tokens: list[int], is_tiled: bool, count: int) -> None:
    job = Job(tokens, count=count, is_tiled=is_tiled)
    taken = job.take_all([1.0 + worker % 3 for worker in range(count)], seed=count)
    times = np.zeros((len(tokens), INNER), np.int64)
    for expert, begin, rows in (unit for units in taken for unit in units):
        times[expert, begin : begin + rows] += 1
        if tokens[expert] > FEW_TOKENS:
            assert rows <= MANY_RUN
            assert begin % 16 == 0
    np.testing.assert_array_equal(times, 1)


def test_who_is_slow_is_left_with_less() -> None:
    job = Job([16] * 32, count=4, is_tiled=True)
    taken = job.take_all([0.2, 1.0, 1.0, 1.0], seed=3)
    rows = [sum(rows for _, _, rows in units) for units in taken]
    assert rows[0] < min(rows[1:]) / 2
    widths = [end - first for first, end in job.columns()]
    assert widths[0] < min(widths[1:])


def test_in_order_where_nobody_helps() -> None:
    job = Job([16, 32, 1], count=2, is_tiled=True)
    place, units = job.places[1], []
    while True:
        place, begin, _ = take_at(job.at, 1, 2, place)
        if place.owner != 1:
            break
        units.append((place.expert, begin))
    assert units == sorted(units)
    assert units


@pytest.mark.parametrize("count", [1, 3, 15])
@pytest.mark.parametrize("tokens", [[1] * 8, [20, 1]], ids=["few", "many"])
def test_columns_are_shared_without_a_gap(tokens: list[int], count: int) -> None:
    job = Job(tokens, count=count, is_tiled=True)
    for is_begun in (False, True):
        if is_begun:
            job.take_all([1.0 + worker for worker in range(count)], seed=1)
        columns = job.columns()
        assert (columns[0][0], columns[-1][1]) == (0, HIDDEN)
        assert all(before[1] == after[0] for before, after in pairwise(columns))
        if max(tokens) > FEW_TOKENS:
            assert all(first % 16 == 0 for first, _ in columns)


def test_a_call_without_experts_has_nothing_to_take() -> None:
    job = Job([], count=2, is_tiled=False)
    assert job.take_all([1.0, 1.0], seed=0) == [[], []]
    assert job.columns() == [(0, HIDDEN // 2), (HIDDEN // 2, HIDDEN)]


def test_what_was_done_counts_products_too() -> None:
    few, many = (Job([tokens], count=1, is_tiled=True) for tokens in (1, 64))
    for job in (few, many):
        job.take_all([1.0], seed=0)
    assert many.done(0) > few.done(0) > 0
