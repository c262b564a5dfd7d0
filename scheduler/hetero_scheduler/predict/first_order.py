"""First-order statistics between adjacent tokens: what sequence models have to beat."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hetero_scheduler.predict.base import Probabilities
from hetero_scheduler.predict.next_step import NextStepPredictor
from hetero_scheduler.predict.routing import RouterShape, chosen_experts, shares
from hetero_scheduler.trace import Trace

Transitions = npt.NDArray[np.float32]


class FirstOrder(NextStepPredictor):
    """Per layer, P(expert next | expert now), averaged over the experts of the last token by their shares.

    The idea is Patterns-MoE's as SeqMoE §2.2 tells it: conditional activation statistics of one layer between
    adjacent tokens, without memory. Further steps apply the transitions again. `transitions` `[L, E, E]`: row
    = expert now, column = expert next, each row sums to 1; `learn_transitions` makes them.
    """

    name = "first_order"

    def __init__(
        self, shape: RouterShape, transitions: Transitions, *, horizon: int = 9, num_groups: int = 2
    ) -> None:
        """Raises ValueError when `transitions` has another shape."""
        super().__init__(shape, horizon=horizon, num_groups=num_groups)
        if transitions.shape != (shape.num_layers, shape.num_experts, shape.num_experts):
            raise ValueError(f"transitions {transitions.shape} do not fit {shape}")
        self._transitions = transitions
        self._last = np.zeros((shape.num_layers, shape.num_experts), dtype=np.float32)

    def _record(self, step: int, layer: int, router_logits: npt.NDArray[np.floating]) -> None:
        self._last[layer] = shares(router_logits, chosen_experts(router_logits, self.shape.top_k))

    def _expect(self, step: int, group: range) -> Probabilities:
        layers = slice(group.start, group.stop)
        expected = np.empty((self.horizon, len(group), self.shape.num_experts), dtype=np.float32)
        now = self._last[layers, None]  # [layers, 1, E]
        for ahead in range(self.horizon):
            now = now @ self._transitions[layers]
            expected[ahead] = now[:, 0]
        return expected


def learn_transitions(trace: Trace, *, prior: float = 1.0) -> Transitions:
    """How often each expert follows each other one in `trace`, documents kept apart. `[L, E, E]`

    `prior`: how many observations the layer's plain frequencies weigh in every row, so that an expert never
    seen predicts them. Raises ValueError when it is not positive.
    """
    if not prior > 0:
        raise ValueError(f"prior is {prior}; it must be above 0")
    num_experts, top_k = trace.num_experts, trace.top_k
    is_first = np.zeros(trace.num_tokens, dtype=bool)
    is_first[trace.bounds[:-1]] = True
    after = np.flatnonzero(~is_first)
    table = np.empty((trace.num_layers, num_experts, num_experts), dtype=np.float32)
    for layer in range(trace.num_layers):
        chosen = trace.topk[:, layer].astype(np.int64)  # [T, K]
        pairs = chosen[after - 1, :, None] * num_experts + chosen[after, None, :]
        counts = np.bincount(pairs.reshape(-1), minlength=num_experts**2).reshape(num_experts, num_experts)
        # add-one, so that the prior of an expert that never occurs is small and not 0
        uses = np.bincount(chosen.reshape(-1), minlength=num_experts) + 1.0
        smoothed = counts + prior * top_k * uses / uses.sum()
        table[layer] = smoothed / smoothed.sum(axis=1, keepdims=True)
    return table
