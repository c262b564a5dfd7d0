"""Between phases: who is early asks for rows and waits, nobody for ever; rows lie where kernels read."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numba import carray, njit

from bench.cpu_expert_records import make_form
from hetero_cpu_kernels.addresses import pointer
from hetero_cpu_kernels.experts.meeting import meet, place_of
from hetero_cpu_kernels.experts.placed import PlacedProjection
from hetero_cpu_kernels.experts.plan import PLAN, address_of
from hetero_cpu_kernels.experts.targets import best_target
from hetero_cpu_kernels.pool import doorbell

RECORD = 1 << 20
ROWS = 64


@njit(nogil=True)
def meet_at(plan_at: int, count: int, rows: Any) -> bool:
    """`meet` before rows of the down projection."""
    plan = carray(pointer(plan_at), 1, PLAN)[0]
    return bool(meet(plan, count, plan.down, rows))


@njit(nogil=True)
def place_at(plan_at: int, row: int) -> tuple[int, int]:
    """`place_of` a row of the down projection of the record at `RECORD`."""
    plan = carray(pointer(plan_at), 1, PLAN)[0]
    where: tuple[int, int] = place_of(plan.down, RECORD, row)
    return where


class Meeting:
    """A plan of one record, and the words that workers arrive at."""

    def __init__(self, name: str = "int4") -> None:
        form = make_form(name, ROWS, ROWS)
        self.control = np.zeros(doorbell.CONTROL_BYTES // 8, np.int64)
        self.record = np.zeros(form.record_bytes, np.uint8)
        self.records = np.array([address_of(self.record)])
        self.matrix = form.down
        self.words = np.zeros(PLAN.itemsize // 8, np.int64)
        plan = self.words.view(PLAN)[0]
        plan["control"], plan["num_experts"] = address_of(self.control), 1
        plan["records_at"] = address_of(self.records)
        self.placed = PlacedProjection(form, form.down, target=best_target())
        self.placed.write(plan["down"])

    def meet(self, count: int, rows: tuple[int, int, int]) -> bool:
        """One worker of `count` arrives."""
        return bool(meet_at(address_of(self.words), count, rows))

    @property
    def num_arrived(self) -> int:
        return int(self.control[doorbell.ARRIVED // 8])


@pytest.mark.parametrize("rows", [(0, 0, ROWS), (0, 3, 5), (0, 7, 7), (1, 0, 0)], ids=str)
def test_the_last_one_goes_on_at_once(rows: tuple[int, int, int]) -> None:
    meeting = Meeting()
    assert meeting.meet(1, rows)
    assert meeting.meet(1, rows)
    assert meeting.num_arrived == 2


@pytest.mark.parametrize("rows", [(0, 0, ROWS), (0, 7, 7)], ids=str)
def test_who_waits_for_one_that_failed_is_set_free(rows: tuple[int, int, int]) -> None:
    meeting = Meeting()
    meeting.control[doorbell.FAILED // 8] = 7
    assert not meeting.meet(2, rows)
    assert meeting.num_arrived == 1


@pytest.mark.parametrize("name", ["bfloat16", "packed", "fp8", "int4"])
def test_rows_lie_where_they_are_asked_for(name: str) -> None:
    meeting = Meeting(name)
    first, row_bytes = place_at(address_of(meeting.words), 0)
    if name == "packed":  # a mantissa of one byte an element
        assert (first - RECORD, row_bytes) == (meeting.matrix.offset // 2, meeting.matrix.cols)
    else:
        assert (first - RECORD, row_bytes) == (meeting.matrix.offset, meeting.matrix.row_bytes)
    assert place_at(address_of(meeting.words), 5)[0] - first == 5 * row_bytes
