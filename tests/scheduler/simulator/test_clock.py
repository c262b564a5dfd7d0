"""The imagined link, transfer by transfer."""

from __future__ import annotations

import pytest

from hetero_scheduler import ExpertKey
from hetero_scheduler.simulator.clock import Copy, Link

A, B, C, D = (Copy(ExpertKey(0, expert), slot=expert, tag=expert + 1) for expert in range(4))


def link_with(*copies: Copy, depth: int = 4) -> Link:
    """A link of 10 ms a record that was given `copies` at 0 ms."""
    link = Link(10.0, depth=depth)
    for copy in copies:
        link.submit(copy, now_ms=0.0)
    return link


def test_one_after_the_other() -> None:
    link = link_with(A, B)
    assert link.arrive(9.9) == []
    assert link.arrive(10.0) == [A]
    assert link.next_arrival_ms == 20.0
    assert link.arrive(99.0) == [B]
    assert link.next_arrival_ms == float("inf")


def test_a_link_that_was_idle_begins_when_it_is_given_something() -> None:
    link = link_with(A)
    link.arrive(10.0)
    link.submit(B, now_ms=50.0)
    assert link.next_arrival_ms == 60.0


def test_no_more_in_flight_than_the_depth() -> None:
    link = link_with(A, B, depth=2)
    assert not link.has_room
    with pytest.raises(AssertionError, match="2 copies are in flight, 2 may be"):
        link.submit(C, now_ms=0.0)


def test_a_demand_on_an_idle_link() -> None:
    assert link_with().demand(3, late=(), now_ms=5.0) == (35.0, [])


def test_a_demand_lets_the_copy_on_the_link_finish_and_overtakes_the_rest() -> None:
    link = link_with(A, B)
    # A until 10, two demanded ones until 30, then B
    assert link.demand(2, late=(), now_ms=5.0) == (30.0, [A])
    assert link.next_arrival_ms == 40.0
    assert link.arrive(40.0) == [B]


def test_a_late_prefetch_overtakes_too_and_only_what_is_left_of_it_is_waited_for() -> None:
    link = link_with(A, B, C)
    assert link.demand(0, late={A.key}, now_ms=5.0) == (10.0, [A])
    assert link.demand(1, late={C.key}, now_ms=12.0) == (40.0, [B, C])


def test_a_demand_that_overtakes_does_not_wait_for_the_copy_on_the_link_which_goes_on_afterwards() -> None:
    link = Link(10.0, depth=4, overtakes=True)
    for copy in (A, B, C):
        link.submit(copy, now_ms=0.0)
    # half of A, two demanded ones until 25, the other half of A, then B
    assert link.demand(2, late=(), now_ms=5.0) == (25.0, [])
    assert link.next_arrival_ms == 30.0
    # C is demanded as well, and there before A and B
    assert link.demand(0, late={C.key}, now_ms=25.0) == (35.0, [C])
    assert link.arrive(50.0) == [A, B]


def test_a_demand_that_overtakes_waits_for_the_copy_on_the_link_where_it_is_demanded_itself() -> None:
    link = Link(10.0, depth=4, overtakes=True)
    link.submit(A, now_ms=0.0)
    assert link.demand(1, late={A.key}, now_ms=5.0) == (20.0, [A])


def test_nothing_to_wait_for_leaves_the_queue_alone() -> None:
    link = link_with(A, B)
    assert link.demand(0, late=(), now_ms=5.0) == (5.0, [])
    assert link.arrive(20.0) == [A, B]
