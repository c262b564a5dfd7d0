"""Which steps are compared with each other: those of as many tokens as most have had of late."""

from __future__ import annotations

from collections import Counter, deque

from hetero_runtime.orchestrator import Orchestrator

LATE = 64
"""Observations: what was usual before them is forgotten."""


class UsualSteps:
    """Tells the orchestrator what steps took, which tries different ways of doing them one after another: a
    step that has more tokens than others takes longer whichever way it is done. For who holds the turn."""

    def __init__(self, orchestrator: Orchestrator) -> None:
        self._orchestrator = orchestrator
        self._late: deque[float] = deque(maxlen=LATE)

    def observe(self, num_steps: int, seconds: float, *, tokens_a_step: float) -> None:
        """So many steps took the device so long together; in the order of the steps."""
        self._late.append(tokens_a_step)
        counts = Counter(self._late)
        if counts[tokens_a_step] == max(counts.values()):
            self._orchestrator.observe_steps(num_steps, seconds)
