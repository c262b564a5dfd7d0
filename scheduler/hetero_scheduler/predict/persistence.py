"""Tomorrow as today: every layer is expected to repeat its last choice."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hetero_scheduler.predict.base import Probabilities
from hetero_scheduler.predict.next_step import NextStepPredictor
from hetero_scheduler.predict.routing import RouterShape


class Persistence(NextStepPredictor):
    """Softmax of the router's last logits over all experts: the last choice first, and behind it those that
    came close to being chosen, so that more than top_k of them can be ranked."""

    name = "persistence"

    def __init__(self, shape: RouterShape, *, horizon: int = 9, num_groups: int = 2) -> None:
        super().__init__(shape, horizon=horizon, num_groups=num_groups)
        self._last = np.zeros((shape.num_layers, shape.num_experts), dtype=np.float32)

    def _record(self, step: int, layer: int, router_logits: npt.NDArray[np.floating]) -> None:
        weights = np.exp(router_logits.astype(np.float32) - np.float32(router_logits.max()))
        self._last[layer] = weights / weights.sum()

    def _expect(self, step: int, group: range) -> Probabilities:
        return np.repeat(self._last[None, group.start : group.stop], self.horizon, axis=0)
