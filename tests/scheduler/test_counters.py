"""Counters of one kind add up field by field and keep their kind."""

from __future__ import annotations

from dataclasses import dataclass

from hetero_scheduler.counters import Counters


@dataclass(frozen=True)
class Seen(Counters):
    number: int = 0
    seconds: float = 0.0


def test_sum_and_difference() -> None:
    assert Seen(3, 0.5) + Seen(4, 0.25) == Seen(7, 0.75)
    assert Seen(3, 0.5) - Seen(4, 0.25) == Seen(-1, 0.25)
    assert type(Seen() + Seen()) is Seen
