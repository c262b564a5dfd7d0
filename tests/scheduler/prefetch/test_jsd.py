"""Algorithm 1 against the paper's example, against brute force, and against its own constraint."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_scheduler import ExpertKey
from hetero_scheduler.prefetch import Task, Tasks
from hetero_scheduler.prefetch.jsd import Jsd, accept

NOTHING_PRESENT = np.zeros((64, 8), dtype=bool)


def task(expert: int, confidence: float, deadline: int) -> Task:
    return Task(ExpertKey(deadline % 64, expert), confidence, deadline)


def accepted(tasks: list[Task], capacity: dict[int, float]) -> set[int]:
    """Indices that `accept` keeps; `tasks` ascend by deadline."""
    return set(accept(Tasks.of(tasks), np.arange(len(tasks)), capacity.__getitem__).tolist())


def is_feasible(tasks: list[Task], chosen: set[int], capacity: dict[int, float]) -> bool:
    return all(sum(tasks[i].deadline <= due for i in chosen) <= room for due, room in capacity.items())


def test_the_papers_example() -> None:
    """SeqMoE Table 2."""
    deadlines, confidences = (1, 2, 2, 3, 3, 3), (0.55, 0.90, 0.40, 0.75, 0.70, 0.30)
    tasks = [task(i, c, d) for i, (c, d) in enumerate(zip(confidences, deadlines, strict=True))]
    assert {"ABCDEF"[i] for i in accepted(tasks, {1: 1, 2: 3, 3: 4})} == set("ABDE")


CASES = st.lists(st.tuples(st.integers(1, 4), st.integers(0, 20)), min_size=1, max_size=8)
ROOMS = st.lists(st.floats(0, 2.5), min_size=4, max_size=4).filter(lambda steps: steps[0] >= 1)


@settings(max_examples=300, deadline=None)
@given(CASES, ROOMS)
def test_what_is_accepted_is_feasible_and_worth_most(
    cases: list[tuple[int, int]], rooms: list[float]
) -> None:
    capacity = {due: float(room) for due, room in enumerate(np.cumsum(rooms), start=1)}
    tasks = [task(i, worth / 20, due) for i, (due, worth) in enumerate(sorted(cases))]
    chosen = accepted(tasks, capacity)
    assert is_feasible(tasks, chosen, capacity)
    best = max(
        sum(tasks[i].confidence for i in some)
        for size in range(len(tasks) + 1)
        for some in combinations(range(len(tasks)), size)
        if is_feasible(tasks, set(some), capacity)
    )
    assert sum(tasks[i].confidence for i in chosen) == pytest.approx(best)


def test_of_equal_confidences_the_earlier_deadline_stays() -> None:
    tasks = [task(0, 0.5, 1), task(1, 0.5, 2), task(2, 0.5, 2)]
    assert accepted(tasks, {1: 1, 2: 2}) == {0, 1}


def test_the_accepted_task_that_is_due_first_goes_first() -> None:
    schedule = Jsd(64, budget=1.0)
    # capacity at pos 0: 2 before pos 2, 3 before pos 3; the weak early task has to leave
    tasks = [task(0, 0.1, 2), task(1, 0.9, 2), task(2, 0.8, 3), task(3, 0.7, 3)]
    schedule.update(Tasks.of(tasks))
    assert [schedule.next(pos, NOTHING_PRESENT) for pos in (0, 1, 1, 1)] == [
        tasks[1],
        tasks[2],
        tasks[3],
        None,
    ]


def test_tasks_for_the_next_layer_come_too_late() -> None:
    schedule = Jsd(64)
    schedule.update(Tasks.of([task(0, 0.9, 5), task(1, 0.9, 6)]))
    assert schedule.next(4, NOTHING_PRESENT) == task(1, 0.9, 6)
    assert schedule.next(4, NOTHING_PRESENT) is None
    assert len(schedule) == 0


def test_the_capacity_is_what_this_layer_has_left_and_the_layers_between() -> None:
    schedule = Jsd(64, budget=2.5)
    schedule.update(Tasks.of([task(i, 0.5, 9) for i in range(6)]))
    rooms = []
    for _ in range(4):
        assert schedule.next(3, NOTHING_PRESENT) is not None
        rooms.append(schedule.capacity(9, 3))
    assert rooms == [1.5 + 12.5, 1 + 12.5, 1 + 12.5, 1 + 12.5]  # at least one more is always allowed
    assert schedule.current_budget == pytest.approx(-1.5)
    schedule.next(4, NOTHING_PRESENT)
    assert schedule.current_budget == pytest.approx(1.5)  # a new layer, a new budget


@pytest.mark.parametrize(("budget", "first"), [(1.5, [1, 2, 2]), (0.5, [1, 1, 1])], ids=["fast", "slow"])
def test_a_copy_that_cannot_end_in_time_waits_for_those_that_can(budget: float, first: list[int]) -> None:
    """Where tasks of the very next layer come in: on a link of more than an expert a layer one of them is
    begun, the next transfer is for the layer behind; on a slow one they are all that is sure."""
    schedule = Jsd(64, budget=budget)
    schedule.lead = 1
    near, later = [task(i, 0.9, 1) for i in range(3)], [task(i, 0.5, 2) for i in range(3, 6)]
    schedule.update(Tasks.of([*near, *later]))
    chosen = [schedule.next(0, NOTHING_PRESENT) for _ in range(3)]
    assert [each and each.deadline for each in chosen] == first


@pytest.mark.parametrize("taken", [0.25, 0.7, 4.0])
def test_the_budget_follows_the_link(taken: float) -> None:
    schedule = Jsd(64, budget=1.0)
    for _ in range(100):
        schedule.landed(task(0, 0.5, 3), taken)
    assert schedule.average_budget == pytest.approx(1 / taken, rel=1e-3)


def test_the_budget_counts_whole_positions_as_well_as_fractions() -> None:
    schedule = Jsd(64, budget=1.0, smoothing=0.02)
    for i in range(2000):  # two transfers of three begin and end within one position
        schedule.landed(task(0, 0.5, 3), 1.0 if i % 3 == 0 else 0.0)
    assert schedule.average_budget == pytest.approx(3.0, rel=0.1)


def test_a_link_without_a_cost_gives_a_finite_budget() -> None:
    schedule = Jsd(64)
    for _ in range(5000):
        schedule.landed(task(0, 0.5, 3), 0.0)
    assert np.isfinite(schedule.average_budget)


@pytest.mark.parametrize(("budget", "smoothing"), [(0.0, 0.1), (float("nan"), 0.1), (1.0, 0.0), (1.0, 1.5)])
def test_impossible_budgets_are_refused(budget: float, smoothing: float) -> None:
    with pytest.raises(ValueError, match="must be above 0"):
        Jsd(64, budget=budget, smoothing=smoothing)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.integers(2, 12), st.floats(0, 1)), max_size=40),
    st.sampled_from([0.3, 1.0, 1.7]),
    st.integers(0, 2),
)
def test_never_more_accepted_than_any_deadline_leaves_room_for(
    cases: list[tuple[int, float]], budget: float, pos: int
) -> None:
    schedule = Jsd(64, budget=budget)
    tasks = [task(i, c, d) for i, (d, c) in enumerate(sorted(cases))]
    kept = accept(Tasks.of(tasks), np.arange(len(tasks)), lambda due: schedule.capacity(due, pos))
    for deadline in {t.deadline for t in tasks}:
        due = sum(tasks[index].deadline <= deadline for index in kept)
        assert due <= schedule.capacity(deadline, pos)
