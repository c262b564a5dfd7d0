"""Job sequencing with deadlines: the tasks that fit, worth most together (SeqMoE §6.2, Algorithm 1).

A set of tasks fits when, for every deadline d, those due by d number at most C(d), the transfers that the
link can end before d. Such sets form a matroid, so a greedy choice is the best one: walk the tasks by
deadline, keep each, and when more than C(d) are kept let the least confident go.

    C(d) = max(1, current) + average · (d - pos - 1)
            what this layer has left   the layers between now and d

Of the accepted tasks the one due first is transferred; after it the choice is made anew.

Two departures from the printed algorithm.

Its line 2, "B_avg + α · B_cur" with B_cur the budget that the last layer left over, moves the average away
from what the link does: n transfers leave B - n, and B + α(B - n) flees n. A link that had nothing to do
leaves budget over too. Here the average follows the transfers themselves: it is the inverse of the moving
average of how many positions each one took.

Where forecasts of the very next layer come in (`lead` 1) and the link carries an expert or more a layer, the
1 in C(d) is left out: a copy that cannot end in time is not begun for the next layer while others still can
be for later ones. On a slower link none ends in time for the next layer, and a late copy of an expert that is
nearly sure still shortens a wait, so there the 1 stays.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from operator import itemgetter

import numpy as np
import numpy.typing as npt

from hetero_scheduler.prefetch.base import Schedule, Task, Tasks

SMOOTHING = 0.1
"""The EMA's α, the weight of a new transfer."""
SHORTEST_TRANSFER = 2.0**-10
"""Positions; a run of transfers that take "no time" must not make the budget infinite."""


def accept(
    tasks: Tasks, indices: npt.NDArray[np.intp], capacity: Callable[[int], float]
) -> npt.NDArray[np.intp]:
    """The feasible subset of greatest total confidence, the most confident first.

    `indices` into `tasks`, ascending by deadline. `capacity(deadline)`: transfers that end before it; it
    never falls with the deadline. Of equal confidences the earlier deadline stays, then the lower index.

    The paper's heap lets the least confident go one by one; here the tasks of one deadline come together.
    """
    by_confidence = (-tasks.confidence[indices]).argsort(kind="stable")
    rank = np.empty_like(by_confidence)
    rank[by_confidence] = np.arange(len(rank))
    kept: list[int] = []
    due_and_rank = zip(tasks.deadline[indices].tolist(), rank.tolist(), strict=True)
    for deadline, group in groupby(due_and_rank, key=itemgetter(0)):
        kept = sorted(kept + [rank for _, rank in group])[: int(capacity(deadline))]
    accepted: npt.NDArray[np.intp] = indices[by_confidence[kept]]
    return accepted


class Jsd(Schedule):
    """SeqMoE's schedule. `average_budget`: transfers a layer-time, moving average; `current_budget`: what the
    running layer has left of it, below 0 when the link did better."""

    name = "jsd"

    def __init__(self, num_layers: int, *, budget: float = 1.0, smoothing: float = SMOOTHING) -> None:
        """`budget`: transfers a layer-time, profiled before. Raises ValueError unless 0 < budget and
        0 < smoothing <= 1."""
        super().__init__(num_layers)
        if not budget > 0 or not 0 < smoothing <= 1:
            raise ValueError(
                f"budget {budget} must be above 0 and smoothing {smoothing} above 0 and at most 1"
            )
        self.average_budget = self.current_budget = budget
        self._smoothing = smoothing
        self._positions_per_transfer = 1.0 / budget
        self._pos: int | None = None

    def capacity(self, deadline: int, pos: int) -> float:
        """C(deadline) at `pos`."""
        is_in_time = self.lead == 1 and self.average_budget >= 1.0
        least = 0.0 if is_in_time else 1.0
        return max(least, self.current_budget) + self.average_budget * (deadline - pos - 1)

    def _choose(self, pos: int, tasks: Tasks, absent: npt.NDArray[np.intp]) -> int | None:
        if pos != self._pos:
            self._pos, self.current_budget = pos, self.average_budget
        accepted = accept(tasks, absent, lambda deadline: self.capacity(deadline, pos))
        if not accepted.size:
            return None
        self.current_budget -= 1.0
        return int(accepted[tasks.deadline[accepted].argmin()])  # the most confident of the earliest deadline

    def landed(self, task: Task, num_positions: float) -> None:
        super().landed(task, num_positions)
        taken = max(num_positions, SHORTEST_TRANSFER)
        self._positions_per_transfer += self._smoothing * (taken - self._positions_per_transfer)
        self.average_budget = 1.0 / self._positions_per_transfer

    def clear(self) -> None:
        super().clear()
        self._pos = None
