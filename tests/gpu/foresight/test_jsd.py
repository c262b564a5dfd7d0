"""Algorithm 1 on the device, decision for decision the host's schedule, slot machine and eviction policy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hetero_gpu.control import Landed
from hetero_gpu.foresight import Candidates, JsdPrefetch, Room
from hetero_gpu.tables import Windows
from hetero_scheduler import ExpertKey, Reservation, SlotState
from hetero_scheduler.predict import Forecast
from hetero_scheduler.prefetch import Task, Tasks, make_schedule
from hetero_scheduler.prefetch.jsd import Jsd, accept
from hetero_scheduler.prefetch.steering import Steering
from tests.gpu.tables.test_ensure import assert_same, routing, run_layer
from tests.gpu.tables.test_prefetch import NUM_EXPERTS, RING, Setting
from tests.gpu.tables.windows_alone import begin_layer

NUM_LAYERS, PER_LAYER, TOP_K, HORIZON = 6, 4, 2, 3
GROUPS = (range(4), range(4, 6))


class Twins:
    """The device's foresight, and the host's, told the same."""

    def __init__(
        self,
        device: torch.device,
        num_slots: int,
        *,
        layer_slots: list[int] | None = None,
        looks_at_next: bool = False,
    ) -> None:
        self.setting = Setting(device, num_slots, "belady", num_layers=NUM_LAYERS, layer_slots=layer_slots)
        tables, is_shared = self.setting.tables, layer_slots is None
        self.windows = Windows(tables, torch.zeros(1, HORIZON, NUM_LAYERS, NUM_EXPERTS, device=device))
        self.candidates = Candidates(self.windows, per_layer=PER_LAYER)
        self.jsd = JsdPrefetch(
            self.candidates, tables=tables, region=self.setting.region, room=Room(TOP_K, is_shared)
        )
        self.jsd.looks_at_next = looks_at_next
        self.schedule = make_schedule("jsd", num_layers=NUM_LAYERS, looks_at_next=looks_at_next)
        assert isinstance(self.schedule, Jsd)
        self.steering = Steering(
            self.schedule,
            self.setting.twin.eviction,
            num_layers=NUM_LAYERS,
            per_layer=PER_LAYER,
            is_shared=is_shared,
        )
        self.active = torch.ones(1, dtype=torch.bool, device=device)
        self.waiting: list[tuple[Task, Reservation]] = []
        self.pos = 0

    def land(self, status: Landed, positions: int) -> None:
        """What was sent first ends."""
        task, held = self.waiting.pop(0)
        self.setting.report(held.slot, held.tag, status, positions=positions)
        self.setting.twin.land(held.slot, held.tag, has_arrived=status is Landed.ARRIVED)
        if status is Landed.ARRIVED:
            self.schedule.landed(task, positions)

    def run(self, layer: int, routed: np.ndarray) -> None:
        self.setting.land()
        begin_layer(self.windows, layer, self.active, torch.from_numpy(routed).to(self.active.device))
        run_layer(self.setting.tables, self.setting.twin, layer, routed)
        self.pos += 1

    def renew(self, layer: int, group: range, shares: np.ndarray) -> None:
        """`shares` `[horizon, layers, experts]` are the newest word on `group`, spoken in `layer`."""
        first_pos = self.pos + 1 + (group.start - layer - 1) % NUM_LAYERS
        self.windows.probabilities[0, :, group.start : group.stop] = torch.from_numpy(shares)
        self.windows.renew(group, self.active)
        self.candidates.renew(group)
        self.steering.take(Forecast(shares, tuple(group), first_pos))

    def ask(self, layer: int) -> list[tuple[int, ...]]:
        """Both choose; what both sent, as (key, slot, tag, deadline)."""
        self.jsd.ask(layer)
        self.setting.sync()
        sent = [_as_sent(task, held) for task, held in self._host_asks()]
        assert self.setting.take() == sent
        assert self.jsd.positions_per_transfer.item() == self.schedule._positions_per_transfer
        assert_same(self.setting.tables, self.setting.twin)
        return sent

    def _host_asks(self) -> list[tuple[Task, Reservation]]:
        machine, new = self.setting.twin.machine, []
        while len(self.waiting) < RING:
            task = self.steering.next(
                self.pos,
                is_present=machine.present(),
                has_slots=lambda layer: machine.num_available(layer) > TOP_K,
            )
            if task is None:
                break
            held = machine.reserve(
                task.key,
                SlotState.FETCH,
                score=self.setting.twin.eviction.score,
                protected=self.setting.twin.required,
            )
            if held is not None:
                new.append((task, held))
                self.waiting.append((task, held))
        return new


def _as_sent(task: Task, held: Reservation) -> tuple[int, ...]:
    return task.key.layer * NUM_EXPERTS + task.key.expert, held.slot, held.tag, task.deadline


def some_shares(rng: np.random.Generator, group: range) -> np.ndarray:
    """With ties and zeros. `[horizon, layers, experts]`"""
    coarse = rng.integers(0, 5, size=(HORIZON, len(group), NUM_EXPERTS)) / 16
    fine = rng.random((HORIZON, len(group), NUM_EXPERTS))
    return np.where(rng.random((1, len(group), 1)) < 0.6, coarse, fine).astype(np.float32)


def kept_by_formula(tasks: list[Task], capacity: dict[int, float]) -> set[int]:
    """The kernel's test, for every task and written down plainly. `tasks` ascend by deadline."""

    def better(i: int, j: int) -> bool:
        (_, ours, due), (_, theirs, their_due) = tasks[i], tasks[j]
        return (ours, -due, -i) > (theirs, -their_due, -j)

    def is_kept(j: int) -> bool:
        left = {
            due: math.floor(room) - sum(task.deadline <= due and better(i, j) for i, task in enumerate(tasks))
            for due, room in capacity.items()
        }
        begins = tasks[j].deadline
        before = min([0, *(room for due, room in left.items() if due < begins)])
        return min(room for due, room in left.items() if due >= begins) > before

    return {j for j in range(len(tasks)) if is_kept(j)}


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 5), st.integers(0, 6)), min_size=1, max_size=14),
    st.lists(st.floats(0, 3), min_size=5, max_size=5).filter(lambda steps: steps[0] >= 1),
)
def test_the_formula_keeps_what_the_host_accepts(cases: list[tuple[int, int]], rooms: list[float]) -> None:
    capacity = {due: float(room) for due, room in enumerate(np.cumsum(rooms), start=1)}
    tasks = [Task(ExpertKey(due, i), worth / 8, due) for i, (due, worth) in enumerate(sorted(cases))]
    accepted = accept(Tasks.of(tasks), np.arange(len(tasks)), capacity.__getitem__)
    assert kept_by_formula(tasks, capacity) == set(accepted.tolist())


@settings(max_examples=3, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    num_slots=st.sampled_from([4, 9, 20]),
    is_shared=st.booleans(),
    slowness=st.integers(0, 4),
    looks_at_next=st.booleans(),
    seed=st.integers(0, 999),
)
def test_every_decision_is_the_hosts(
    device: torch.device, num_slots: int, is_shared: bool, slowness: int, looks_at_next: bool, seed: int
) -> None:
    """Links of any speed, landings that come late or empty, slots that are scarce; forecasts now and then,
    and of the next layer just in time."""
    rng = np.random.default_rng(seed)
    layer_slots = None if is_shared else [3, 3, 4, 3, 3, 4]
    num_slots = num_slots if is_shared else 20
    twins = Twins(device, num_slots, layer_slots=layer_slots, looks_at_next=looks_at_next)
    for step in range(2):
        for layer in range(NUM_LAYERS):
            for _ in range(rng.integers(0, len(twins.waiting) + 1)):
                twins.land(Landed(int(rng.random() < 0.8)), int(rng.integers(0, slowness + 1)))
            twins.run(layer, routing(rng, NUM_EXPERTS, (1, TOP_K)))
            for group in GROUPS:
                if layer == group.stop - 1 and (step == 0 or rng.random() < 0.8):
                    twins.renew(layer, group, some_shares(rng, group))
            if looks_at_next and layer + 1 < NUM_LAYERS and rng.random() < 0.8:
                following = range(layer + 1, layer + 2)
                twins.renew(layer, following, some_shares(rng, following))
            twins.ask(layer)


def all_absent(device: torch.device, pace: float, *, looks_at_next: bool = False) -> Twins:
    """Layer 0 has begun with room for everything; a transfer takes `pace` positions."""
    twins = Twins(device, 4 * NUM_EXPERTS, looks_at_next=looks_at_next)
    twins.run(0, np.array([[0, 1]]))
    twins.jsd.positions_per_transfer.fill_(pace)
    twins.schedule._positions_per_transfer = pace
    twins.schedule.average_budget = twins.schedule.current_budget = 1 / pace
    return twins


@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    worth=st.lists(st.integers(0, 9), min_size=25, max_size=25),
    pace=st.sampled_from([0.25, 0.5, 1.0, 2.0, 4.0]),
)
def test_what_is_selected_is_what_the_heap_selects(
    device: torch.device, worth: list[int], pace: float
) -> None:
    """Everything is absent and all deadlines compete."""
    twins, shares = all_absent(device, pace), np.zeros((HORIZON, 5, NUM_EXPERTS), np.float32)
    shares[0] = np.array(worth, dtype=np.float32).reshape(5, NUM_EXPERTS) / 16
    twins.renew(0, range(1, 6), shares)
    twins.ask(0)


def test_a_weak_early_task_makes_room_for_a_strong_late_one(device: torch.device) -> None:
    """One transfer every four layers: layer 3 goes before layer 2, which is due earlier."""
    twins, shares = all_absent(device, pace=4.0), np.zeros((HORIZON, 2, NUM_EXPERTS), np.float32)
    shares[0, 0, 3], shares[0, 1, 4] = 0.25, 0.5
    twins.renew(0, range(2, 4), shares)
    assert [key for key, *_ in twins.ask(0)] == [3 * NUM_EXPERTS + 4, 2 * NUM_EXPERTS + 3]


def test_tasks_of_the_next_layer_are_given_up_for_good(device: torch.device) -> None:
    twins, shares = all_absent(device, pace=0.25), np.zeros((HORIZON, 1, NUM_EXPERTS), np.float32)
    shares[0, 0, 3] = 0.5
    twins.renew(0, range(1, 2), shares)
    assert twins.ask(0) == []
    for layer in (1, 2):
        twins.run(layer, np.array([[0, 1]]))
        assert twins.ask(layer) == []
    assert bool((twins.candidates.expert == -1).all())


def test_tasks_of_the_next_layer_are_asked_for_where_forecasts_come_in_time(device: torch.device) -> None:
    """As many as the link takes; what is left of them is not mistaken for the next step's."""
    twins = all_absent(device, pace=2.0, looks_at_next=True)
    shares = np.zeros((HORIZON, 1, NUM_EXPERTS), np.float32)
    shares[0, 0, 2:] = 0.25, 0.5, 0.125
    twins.renew(0, range(1, 2), shares)
    assert [key for key, *_ in twins.ask(0)] == [NUM_EXPERTS + 3, NUM_EXPERTS + 2, NUM_EXPERTS + 4]
    twins.renew(0, range(1, 2), np.ones((HORIZON, 1, NUM_EXPERTS), np.float32) / 8)
    twins.ask(0)
    for layer in (1, 2):
        twins.run(layer, np.array([[0, 1]]))
        assert twins.ask(layer) == []


def test_a_transfer_that_took_for_ever_counts_as_one_step(device: torch.device) -> None:
    twins, shares = all_absent(device, pace=1.0), np.ones((HORIZON, 1, NUM_EXPERTS), np.float32) / 8
    twins.renew(0, range(3, 4), shares)
    twins.ask(0)
    _, held = twins.waiting[0]
    twins.setting.report(held.slot, held.tag, Landed.ARRIVED, positions=1 << 40)
    twins.setting.land()
    twins.jsd.ask(0)
    assert twins.jsd.positions_per_transfer.item() == pytest.approx(0.9 + 0.1 * NUM_LAYERS)


def test_of_rows_that_step_together_the_mean_counts(device: torch.device) -> None:
    setting = Setting(device, 8, "belady", num_layers=NUM_LAYERS)
    windows = Windows(setting.tables, torch.zeros(3, HORIZON, NUM_LAYERS, NUM_EXPERTS, device=device))
    candidates = Candidates(windows, per_layer=3)
    windows.probabilities[0, 0, 1] = torch.tensor([0.5, 0.0, 0.25, 0.25, 0.0])
    windows.probabilities[2, 0, 1] = torch.tensor([0.0, 0.0, 0.75, 0.25, 0.0])
    windows.probabilities[1, 0, 1] = 1.0  # nobody is in this row
    windows.renew(range(1, 2), torch.tensor([True, False, True], device=device))
    candidates.renew(range(1, 2))
    assert candidates.expert[1].tolist() == [2, 0, 3]
    assert candidates.confidence[1].tolist() == [0.5, 0.25, 0.25]
    assert bool((candidates.expert[[0, 2, 3, 4, 5]] == -1).all())
    chosen = torch.zeros(3, 1, dtype=torch.int64, device=device)
    begin_layer(windows, 1, torch.tensor([False, False, True], device=device), chosen)
    candidates.renew(range(1, 2))
    assert candidates.expert[1].tolist() == [
        0,
        2,
        3,
    ]  # the row that has run wants nothing before its next word
    with pytest.raises(ValueError, match="per_layer is 6; it must be 1 to 5"):
        Candidates(windows, per_layer=6)


def test_an_expert_evicted_for_a_prefetch_can_be_asked_for_again(device: torch.device) -> None:
    """Its own task is a candidate once more, in the same visit."""
    twins = Twins(device, 5)
    for expert in range(0, 4, 2):
        twins.run(0, np.array([[expert, expert + 1]]))
    twins.jsd.positions_per_transfer.fill_(0.25)
    twins.schedule._positions_per_transfer = 0.25
    twins.schedule.average_budget = twins.schedule.current_budget = 4.0
    for layer, share in ((2, 0.5), (0, 0.125)):
        shares = np.zeros((HORIZON, 1, NUM_EXPERTS), np.float32)
        shares[0, 0, :2] = share
        twins.renew(0, range(layer, layer + 1), shares)
    assert [key for key, *_ in twins.ask(0)] == [2 * NUM_EXPERTS, 2 * NUM_EXPERTS + 1, 0]
