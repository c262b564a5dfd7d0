"""Prefetch schedules: which expert does the link carry next?"""

from __future__ import annotations

from hetero_scheduler.prefetch.base import Schedule, Task, Tasks
from hetero_scheduler.prefetch.propose import propose

SCHEDULES = ("jsd", "moe_infinity", "promoe", "edf", "top_b")

__all__ = ["SCHEDULES", "Schedule", "Task", "Tasks", "make_schedule", "propose"]


def make_schedule(
    name: str, *, num_layers: int, budget: float = 1.0, looks_at_next: bool = False
) -> Schedule:
    """The schedule called `name`, with no candidates yet. Raises ValueError for a name that is none.

    `budget`: transfers that the link ends while one layer runs, as profiled so far; only `jsd` asks for it.
    `looks_at_next`: whether forecasts of the very next layer come in, so that tasks for it are worth having.
    """
    schedule = _make(name, num_layers=num_layers, budget=budget)
    if looks_at_next:
        schedule.lead = 1
    return schedule


def _make(name: str, *, num_layers: int, budget: float) -> Schedule:
    if name == "jsd":
        from hetero_scheduler.prefetch.jsd import Jsd

        return Jsd(num_layers, budget=budget)
    if name == "moe_infinity":
        from hetero_scheduler.prefetch.moe_infinity import MoeInfinity

        return MoeInfinity(num_layers)
    if name == "promoe":
        from hetero_scheduler.prefetch.promoe import ProMoe

        return ProMoe(num_layers)
    if name == "edf":
        from hetero_scheduler.prefetch.edf import Edf

        return Edf(num_layers)
    if name == "top_b":
        from hetero_scheduler.prefetch.top_b import TopB

        return TopB(num_layers)
    raise ValueError(f"unknown prefetch schedule {name!r}; known: {', '.join(SCHEDULES)}")
