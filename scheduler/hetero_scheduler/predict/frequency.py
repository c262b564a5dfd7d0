"""How often each expert has been used, taken for what will be used."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hetero_scheduler.predict.base import Probabilities
from hetero_scheduler.predict.next_step import NextStepPredictor
from hetero_scheduler.predict.routing import RouterShape, chosen_experts


class Frequency(NextStepPredictor):
    """Share of each expert among the uses of its layer, the same for every step ahead.

    `counts` `[L, E]`: uses known beforehand, from an offline profile or a prefill; none by default.
    `is_running`: whether uses seen since the last `reset` are added to them. A layer without any count
    expects its experts alike.
    """

    name = "frequency"

    def __init__(
        self,
        shape: RouterShape,
        *,
        horizon: int = 9,
        num_groups: int = 2,
        counts: npt.NDArray[np.floating] | None = None,
        is_running: bool = True,
    ) -> None:
        """Raises ValueError when `counts` has another shape or a negative entry."""
        super().__init__(shape, horizon=horizon, num_groups=num_groups)
        known = np.zeros((shape.num_layers, shape.num_experts)) if counts is None else np.array(counts, float)
        if known.shape != (shape.num_layers, shape.num_experts) or (known < 0).any():
            raise ValueError(f"counts {known.shape} must be {shape[:2]} and none of them negative")
        self._known, self._counts, self._is_running = known, known.copy(), is_running

    def reset(self) -> None:
        super().reset()
        self._counts = self._known.copy()

    def _record(self, step: int, layer: int, router_logits: npt.NDArray[np.floating]) -> None:
        if self._is_running:
            self._counts[layer, chosen_experts(router_logits, self.shape.top_k)] += 1.0

    def _expect(self, step: int, group: range) -> Probabilities:
        counts = self._counts[group.start : group.stop]
        total = counts.sum(axis=1, keepdims=True)
        even = np.full_like(counts, 1.0 / self.shape.num_experts)
        expected = np.divide(counts, total, out=even, where=total > 0).astype(np.float32)
        return np.repeat(expected[None], self.horizon, axis=0)
