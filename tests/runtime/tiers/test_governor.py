"""Memory pressure, told by files; and the governor, on a clock of its own."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from hetero_runtime.tiers.governor import CALM_S, LOOK_S, STALLED, Governor, Marks
from hetero_runtime.tiers.pressure import Pressure, read_pressure

SLOT = 100
MARKS = Marks(low=1000, high=2000)


class FakeTier:
    """Of 16 slots, 4 cannot be given back; what is given back is free memory."""

    def __init__(self) -> None:
        self.num_here, self.free, self.stalled, self.now = 16, 5000, 0.0, 100.0
        self.history: list[int] = []

    def shrink(self, num_slots: int) -> int:
        given = min(num_slots, self.num_here - 4)
        return -self._change(-given)

    def grow(self, num_slots: int) -> int:
        return self._change(num_slots)

    def _change(self, by: int) -> int:
        self.num_here += by
        self.free -= by * SLOT
        self.history.append(by)
        return by

    def governor(self) -> Governor:
        return Governor(
            self,
            num_slots=16,
            slot_bytes=SLOT,
            marks=MARKS,
            read=lambda: Pressure(self.free, self.stalled),
            clock=lambda: self.now,
        )

    def pass_time(self, governor: Governor, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            governor.look()
            self.now += LOOK_S


def test_with_memory_enough_nothing_changes() -> None:
    tier = FakeTier()
    tier.pass_time(tier.governor(), 60)
    assert tier.history == []


def test_it_gives_back_what_is_lacking_and_no_more() -> None:
    tier = FakeTier()
    governor = tier.governor()
    tier.free = 650
    tier.pass_time(governor, 5)
    assert tier.history == [-4]  # 350 bytes below the mark, in whole slots
    assert (tier.free, governor.num_given_back) == (1050, 4)


def test_it_gives_back_all_it_may_and_stays() -> None:
    tier = FakeTier()
    governor = tier.governor()
    tier.free = -5000
    tier.pass_time(governor, 3)
    assert tier.num_here == 4
    assert governor.num_given_back == 12


def test_it_takes_again_after_calm_step_by_step_and_never_swings() -> None:
    tier = FakeTier()
    governor = tier.governor()
    tier.free = 300
    tier.pass_time(governor, 1)
    assert tier.history == [-7]
    tier.free = 2550  # room for 5 above the high mark
    tier.pass_time(governor, CALM_S - 1)
    assert tier.history == [-7]
    tier.pass_time(governor, 60)
    assert tier.history == [-7, 2, 2, 1]
    assert tier.free >= MARKS.high
    tier.pass_time(governor, 60)
    assert len(tier.history) == 4


def test_between_the_marks_only_stalls_count() -> None:
    tier = FakeTier()
    governor = tier.governor()
    tier.free = 1500
    tier.pass_time(governor, 60)
    assert tier.history == []
    tier.stalled = 2 * STALLED
    tier.pass_time(governor, 10)
    assert tier.history == [-2] * 3  # until the high mark
    tier.free = 5000
    tier.pass_time(governor, 1)
    assert len(tier.history) == 3  # others may stall: here is enough


def test_looks_are_rare(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[float] = []
    tier = FakeTier()

    def read() -> Pressure:
        looks.append(tier.now)
        return Pressure(5000, 0.0)

    governor = Governor(tier, num_slots=16, slot_bytes=SLOT, marks=MARKS, read=read, clock=lambda: tier.now)
    for _ in range(100):
        governor.look()
        tier.now += LOOK_S / 10
    assert len(looks) == 10


def test_marks_follow_the_memory_there_is() -> None:
    assert Marks.of(6400) == (100, 200)
    assert Marks.of(1 << 40).low == 256 << 20


def write(root: Path, name: str, text: str) -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text, encoding="ascii")


def test_pressure_of_this_machine() -> None:
    pressure = read_pressure()
    assert 0 < pressure.free_bytes <= psutil.virtual_memory().total
    assert 0 <= pressure.stalled <= 1


def test_pressure_of_a_group_comes_before_the_machines(tmp_path: Path) -> None:
    assert read_pressure(tmp_path).stalled == 0
    write(tmp_path, "proc/pressure/memory", "some avg10=12.50 avg60=0.00\nfull avg10=1.00\n")
    assert read_pressure(tmp_path).stalled == 0.125
    write(tmp_path, "proc/self/cgroup", "0::/mine\n")
    write(tmp_path, "sys/fs/cgroup/mine/memory.pressure", "some avg10=40.00 avg60=0.00\n")
    write(tmp_path, "sys/fs/cgroup/mine/memory.max", "1000000")
    write(tmp_path, "sys/fs/cgroup/mine/memory.current", "400000")
    assert read_pressure(tmp_path) == Pressure(600_000, 0.4)


def test_a_group_of_version_1_has_a_limit_and_the_machines_pressure(tmp_path: Path) -> None:
    write(tmp_path, "proc/self/cgroup", "4:memory:/mine\n")
    write(tmp_path, "sys/fs/cgroup/memory/mine/memory.limit_in_bytes", "1000000")
    write(tmp_path, "sys/fs/cgroup/memory/mine/memory.usage_in_bytes", "900000")
    write(tmp_path, "sys/fs/cgroup/memory/mine/memory.stat", "total_inactive_file 50000\n")
    write(tmp_path, "proc/pressure/memory", "some avg10=7.00 avg60=0.00\n")
    assert read_pressure(tmp_path) == Pressure(150_000, pytest.approx(0.07))
