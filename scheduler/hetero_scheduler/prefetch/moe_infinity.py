"""The score of MoE-Infinity: confidence, discounted by how far away the deadline is."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hetero_scheduler.prefetch.base import Schedule, Tasks


class MoeInfinity(Schedule):
    """Greatest confidence · (1 - (deadline - pos) / (num_layers + 1)), as SeqMoE §3.2 gives the rule.

    Taken: the score, with `pos` moving on. Not taken: MoE-Infinity's own predictor (matching of request
    traces) and its dropping rule: like SeqMoE's ablation, this differs from `jsd` in the choice only. Each
    task is judged alone, so a confident one far away can crowd out one that cannot wait. Ties: earlier
    deadline, then lower expert.
    """

    name = "moe_infinity"

    def _choose(self, pos: int, tasks: Tasks, absent: npt.NDArray[np.intp]) -> int | None:
        if not absent.size:
            return None
        discount = 1.0 - (tasks.deadline[absent] - pos) / (self.num_layers + 1)
        return int(absent[np.argmax(tasks.confidence[absent] * discount)])
