"""Captured steps that go two ways, without forecasts and with them, in tests that decode few of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from hetero_runtime.orchestrator import captured_prefetch
from hetero_runtime.stepping import graph as graph_stepping
from hetero_scheduler import trials
from hetero_scheduler.trials import Trials


def forecasts_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines loaded from now on begin with forecasts; a test is over before they try to do without."""
    monkeypatch.setattr(captured_prefetch, "Trials", lambda choices: Trials(choices[::-1]))


def ways_change_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each way is tried for three steps, one after another."""
    for name, steps in (("SETTLE_STEPS", 1), ("BLOCK_STEPS", 2)):
        monkeypatch.setattr(trials, name, steps)
    monkeypatch.setattr(graph_stepping, "MOST_STEPS", 1)


def slow_with_forecasts(orchestrator: Any, ways: list[int]) -> Callable[[int, float], None]:
    """What hears of steps, but with times that were made up. `ways`: grows by the way of each."""
    observe_steps = orchestrator.observe_steps

    def observe(num_steps: int, _seconds: float) -> None:
        ways.append(orchestrator.way)
        observe_steps(num_steps, num_steps * (1.0 + orchestrator.way))

    return observe
