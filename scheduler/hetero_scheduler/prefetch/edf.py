"""Earliest deadline first, and nothing else."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hetero_scheduler.prefetch.base import Schedule, Tasks


class Edf(Schedule):
    """The textbook rule: whatever is due first, ties to the lowest layer and expert.

    Best when all tasks fit; blind to confidence, so under a scarce link it is the floor that the other
    schedules should stand above. `jsd` uses the same pick (SeqMoE Algorithm 1, line 11), but only among tasks
    that it has accepted.
    """

    name = "edf"

    def _choose(self, pos: int, tasks: Tasks, absent: npt.NDArray[np.intp]) -> int | None:
        return int(absent[0]) if absent.size else None
