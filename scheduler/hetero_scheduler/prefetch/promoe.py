"""The order of ProMoE: earliest deadline first, and of one deadline the most confident."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hetero_scheduler.prefetch.base import Schedule, Tasks


class ProMoe(Schedule):
    """Lexicographic (-deadline, confidence), greatest first, as SeqMoE §3.2 gives the rule.

    Taken: the order. Not taken: ProMoE's predictor (an MLP on shallow hidden states) and its splitting of a
    transfer into chunks. A doubtful task for the next layers always precedes a sure one after them. Ties:
    lower expert.
    """

    name = "promoe"

    def _choose(self, pos: int, tasks: Tasks, absent: npt.NDArray[np.intp]) -> int | None:
        if not absent.size:
            return None
        earliest = absent[tasks.deadline[absent] == tasks.deadline[absent[0]]]
        return int(earliest[np.argmax(tasks.confidence[earliest])])
