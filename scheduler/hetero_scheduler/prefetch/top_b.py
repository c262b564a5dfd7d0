"""VisMMOE's prefetch: the B experts of highest priority within the next W layers (§3.3.2, §3.4.2)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hetero_scheduler.prefetch.base import Schedule, Tasks

WINDOW, DECAY, SIZE = 5, 0.8, 20
"""W, γ and B of the paper."""


class TopB(Schedule):
    """Priority γ^(d-1) · confidence for a deadline d layers ahead, 1 <= d <= W (Eq. 9). The B greatest are
    the ordered candidate set, and the first of them that is absent is fetched. W, γ and B as in §3.3.3.

    Resident experts count among the B, for the set is the predictor's, not the cache's. Eq. 9 takes an
    expert's maximum over d; here a task is one layer's, so each expert has one d. The decay is applied here,
    for predictors that say shares; one that has learnt decayed targets takes it off again. Ties: earlier
    deadline, then lower expert.
    """

    name = "top_b"
    lead = 1  # the next layer lies inside the window

    def __init__(
        self, num_layers: int, *, window: int = WINDOW, decay: float = DECAY, size: int = SIZE
    ) -> None:
        """`window`: W, layers. `decay`: γ, in (0, 1]. `size`: B, experts. Raises ValueError outside these."""
        super().__init__(num_layers)
        if window < 1 or size < 1 or not 0 < decay <= 1:
            raise ValueError(
                f"window {window} and size {size} must be at least 1, decay {decay} above 0 and at most 1"
            )
        self._window, self._decay, self._size = window, decay, size

    def _choose(self, pos: int, tasks: Tasks, absent: npt.NDArray[np.intp]) -> int | None:
        if not absent.size:
            return None
        near = int(tasks.deadline.searchsorted(pos + self._window, side="right"))
        distance = tasks.deadline[:near] - pos
        priority = tasks.confidence[:near] * self._decay ** (distance - 1)
        ordered = np.argsort(-priority, kind="stable")[: self._size]
        is_absent = np.zeros(len(tasks), dtype=np.bool_)
        is_absent[absent] = True
        wanted = ordered[is_absent[ordered]]
        return int(wanted[0]) if wanted.size else None
