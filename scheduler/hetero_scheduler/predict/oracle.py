"""A predictor that has read the trace: the bound of what prediction can give."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hetero_scheduler.predict.base import Probabilities
from hetero_scheduler.predict.next_step import NextStepPredictor
from hetero_scheduler.predict.routing import RouterShape, shares
from hetero_scheduler.trace import Trace


class Oracle(NextStepPredictor):
    """Forecasts what `trace` will route: each chosen expert's share (SeqMoE §5.2), 0 for all others.

    `step` counts the trace's tokens, over documents as well. `num_seen`: steps ahead that it knows, `horizon`
    by default; entries beyond them, and beyond the end of the document, are 0.
    """

    name = "oracle"

    def __init__(
        self, trace: Trace, *, horizon: int = 9, num_groups: int = 2, num_seen: int | None = None
    ) -> None:
        """Raises ValueError when `num_seen` is not 1 to `horizon`."""
        shape = RouterShape(trace.num_layers, trace.num_experts, trace.top_k)
        super().__init__(shape, horizon=horizon, num_groups=num_groups)
        self._num_seen = horizon if num_seen is None else num_seen
        if not 1 <= self._num_seen <= horizon:
            raise ValueError(f"num_seen is {num_seen}; it must be 1 to {horizon}")
        self._trace = trace

    def _record(self, step: int, layer: int, router_logits: npt.NDArray[np.floating]) -> None:
        assert step < self._trace.num_tokens, f"step {step} lies beyond the trace"

    def _expect(self, step: int, group: range) -> Probabilities:
        bounds = self._trace.bounds
        document_end = int(bounds[np.searchsorted(bounds, step, side="right")])
        end = min(step + 1 + self._num_seen, document_end)
        steps, layers = slice(step + 1, end), slice(group.start, group.stop)
        expected = np.zeros((self.horizon, len(group), self.shape.num_experts), dtype=np.float32)
        known = shares(self._trace.logits[steps, layers], self._trace.topk[steps, layers])
        expected[: len(known)] = known
        return expected
