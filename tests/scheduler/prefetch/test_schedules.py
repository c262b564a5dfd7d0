"""What every schedule owes its caller, and the order that each one of them prefers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_scheduler import ExpertKey
from hetero_scheduler.predict import Forecast
from hetero_scheduler.prefetch import SCHEDULES, Schedule, Task, Tasks, make_schedule, propose
from hetero_scheduler.prefetch.jsd import Jsd
from hetero_scheduler.prefetch.top_b import TopB

NUM_LAYERS, NUM_EXPERTS = 4, 6
NOTHING_PRESENT = np.zeros((NUM_LAYERS, NUM_EXPERTS), dtype=bool)


def task(expert: int, confidence: float, deadline: int) -> Task:
    return Task(ExpertKey(deadline % NUM_LAYERS, expert), confidence, deadline)


def schedule_of(name: str, tasks: list[Task]) -> Schedule:
    schedule = make_schedule(name, num_layers=NUM_LAYERS, budget=2.0)
    schedule.update(Tasks.of(tasks))
    return schedule


def experts(schedule: Schedule, *positions: int) -> list[int | None]:
    """The experts handed out, one transfer at each of `positions`."""
    chosen = [schedule.next(pos, NOTHING_PRESENT) for pos in positions]
    return [None if one is None else one.key.expert for one in chosen]


class ExampleCapacity(Jsd):
    """Table 2's capacities 1, 3 and 4, less what was transferred before."""

    num_transferred = 0

    def capacity(self, deadline: int, pos: int) -> float:
        return (1, 3, 4)[deadline - 1] - self.num_transferred


@pytest.mark.parametrize(
    ("name", "expected"), [("jsd", "ABDE"), ("moe_infinity", "BDEF"), ("promoe", "ABCD"), ("edf", "ABCD")]
)
def test_the_papers_example_in_four_transfers(name: str, expected: str) -> None:
    """SeqMoE Table 2. One transfer ends before deadline 1, three before 2, four before 3; a schedule drops
    deadlines up to pos + 1, so the four begin at -1, 0, 0, 1."""
    schedule = ExampleCapacity(48) if name == "jsd" else make_schedule(name, num_layers=48)
    confidences, deadlines = (0.55, 0.90, 0.40, 0.75, 0.70, 0.30), (1, 2, 2, 3, 3, 3)
    schedule.update(
        Tasks.of(task(i, c, d) for i, (c, d) in enumerate(zip(confidences, deadlines, strict=True)))
    )
    chosen = ""
    for num_transferred, pos in enumerate((-1, 0, 0, 1)):
        if isinstance(schedule, ExampleCapacity):
            schedule.num_transferred = num_transferred
        one = schedule.next(pos, NOTHING_PRESENT)
        assert one is not None
        chosen += "ABCDEF"[one.key.expert]
    assert chosen == expected


@pytest.mark.parametrize("name", SCHEDULES)
class TestContract:
    def test_what_is_present_is_skipped_and_stays_a_candidate(self, name: str) -> None:
        schedule = schedule_of(name, [task(0, 0.9, 4), task(1, 0.2, 4)])
        is_present = NOTHING_PRESENT.copy()
        is_present[0, 0] = True
        assert schedule.next(2, is_present) == task(1, 0.2, 4)
        assert schedule.next(2, is_present) is None
        assert schedule.next(2, NOTHING_PRESENT) == task(0, 0.9, 4)  # evicted meanwhile

    def test_a_fresher_forecast_takes_the_place_of_the_older_for_its_deadlines(self, name: str) -> None:
        schedule = schedule_of(name, [task(0, 0.9, 4), task(1, 0.9, 4), task(2, 0.1, 5)])
        schedule.update(Tasks.of([task(1, 0.3, 4)]))
        assert [schedule.next(2, NOTHING_PRESENT) for _ in range(3)] == [
            task(1, 0.3, 4),
            task(2, 0.1, 5),
            None,
        ]

    def test_overdue_tasks_are_never_handed_out(self, name: str) -> None:
        schedule = schedule_of(name, [task(0, 0.9, 4), task(1, 0.1, 6)])
        assert schedule.next(4, NOTHING_PRESENT) == task(1, 0.1, 6)
        assert schedule.next(4, NOTHING_PRESENT) is None

    def test_a_new_document_starts_without_candidates(self, name: str) -> None:
        schedule = schedule_of(name, [task(0, 0.9, 9)])
        schedule.clear()
        assert schedule.next(0, NOTHING_PRESENT) is None
        schedule.update(Tasks.of([task(0, 0.9, 4)]))
        assert schedule.next(0, NOTHING_PRESENT) == task(0, 0.9, 4)

    @settings(max_examples=30, deadline=None)
    @given(
        cases=st.lists(st.tuples(st.integers(0, 5), st.floats(0, 1), st.integers(1, 12)), max_size=20),
        absent=st.lists(st.booleans(), min_size=24, max_size=24),
    )
    def test_each_task_is_handed_out_once_in_time_and_absent(
        self, name: str, cases: list[tuple[int, float, int]], absent: list[bool]
    ) -> None:
        tasks = list({(e, d): task(e, c, d) for e, c, d in cases}.values())
        schedule = schedule_of(name, tasks)
        is_present = ~np.array(absent).reshape(NUM_LAYERS, NUM_EXPERTS)
        given_out = []
        for pos in range(12):
            while (one := schedule.next(pos, is_present)) is not None:
                assert one in tasks and one.deadline > pos and not is_present[one.key]
                given_out.append(one)
        assert len(set(given_out)) == len(given_out)
        assert len(schedule) <= len(tasks) - len(given_out)


def test_moe_infinity_discounts_by_distance() -> None:
    # scores at pos 0 of a model of 4 layers: 0.5 · 3/5, 0.7 · 2/5, 0.9 · 1/5
    tasks = [task(0, 0.5, 2), task(1, 0.7, 3), task(2, 0.9, 4)]
    assert experts(schedule_of("moe_infinity", tasks), 0, 0, 0) == [0, 1, 2]
    far_but_sure = [task(0, 0.3, 2), task(1, 0.9, 3)]
    assert experts(schedule_of("moe_infinity", far_but_sure), 0, 0) == [1, 0]


def test_promoe_takes_the_surest_of_the_next_deadline() -> None:
    tasks = [task(0, 0.1, 2), task(1, 0.4, 2), task(2, 0.9, 3)]
    assert experts(schedule_of("promoe", tasks), 0, 0, 0) == [1, 0, 2]


def test_edf_does_not_look_at_confidence() -> None:
    tasks = [task(0, 0.1, 2), task(1, 0.4, 2), task(2, 0.9, 3)]
    assert experts(schedule_of("edf", tasks), 0, 0, 0) == [0, 1, 2]


def test_top_b_looks_a_window_ahead_and_decays() -> None:
    tasks = [task(0, 0.5, 1), task(1, 0.6, 2), task(2, 0.99, 5), task(3, 1.0, 6)]
    schedule = schedule_of("top_b", tasks)  # priorities at pos 0: 0.5, 0.48, 0.41; 6 is too far
    assert experts(schedule, 0, 0, 0, 0, 1) == [0, 1, 2, None, 3]


def test_top_b_counts_present_experts_among_the_b() -> None:
    schedule = TopB(NUM_LAYERS, size=2)
    schedule.update(Tasks.of([task(0, 0.9, 2), task(1, 0.8, 2), task(2, 0.7, 2)]))
    is_present = NOTHING_PRESENT.copy()
    is_present[2, [0, 1]] = True
    assert schedule.next(0, is_present) is None
    is_present[2, 1] = False
    assert schedule.next(0, is_present) == task(1, 0.8, 2)


@pytest.mark.parametrize("wrong", [{"window": 0}, {"size": 0}, {"decay": 0.0}, {"decay": 1.1}])
def test_impossible_windows_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        TopB(NUM_LAYERS, **wrong)  # type: ignore[arg-type]


def test_unknown_schedules_are_refused_with_what_is_known() -> None:
    with pytest.raises(ValueError, match="jsd, moe_infinity"):
        make_schedule("fifo", num_layers=2)


def test_a_forecast_becomes_tasks_for_its_likeliest_experts() -> None:
    probabilities = np.zeros((3, 2, NUM_EXPERTS), dtype=np.float32)
    probabilities[0, 0, [4, 1]] = 0.75, 0.25
    probabilities[0, 1, [0, 5]] = 0.5, 0.5
    forecast = Forecast(probabilities, layers=(2, 3), first_pos=3 * NUM_LAYERS + 2)
    tasks = propose(forecast, num_layers=NUM_LAYERS, per_layer=2)
    assert [tasks[i] for i in range(len(tasks))] == [
        Task(ExpertKey(2, 4), 0.75, 14),
        Task(ExpertKey(2, 1), 0.25, 14),
        Task(ExpertKey(3, 0), 0.5, 15),
        Task(ExpertKey(3, 5), 0.5, 15),
    ]
    with pytest.raises(ValueError, match="1 to 6"):
        propose(forecast, num_layers=NUM_LAYERS, per_layer=7)
