"""Eviction that has read the rest of the trace: bounds for the simulator, never for serving.

Each of them is made for one trace and must then be shown exactly that trace: one token a pass, layers 0..L-1.
The cache outlives documents, and so does what an oracle knows.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import numpy.typing as npt

from hetero_scheduler.eviction.base import EvictionPolicy
from hetero_scheduler.trace import Trace

ORACLES = ("oracle_belady", "oracle_belady_8", "oracle_score_8")


class OracleBelady(EvictionPolicy):
    """Belady's MIN: out goes the expert whose next use lies farthest ahead. Score: -pos of the next use.

    `window`: steps ahead that the oracle sees, None for all (SeqMoE Fig. 3: Belady, and Belady-8 with 8).
    Experts without a use in sight go first, least recently used first.
    """

    name: ClassVar[str] = "oracle_belady"

    def __init__(self, trace: Trace, *, window: int | None = None) -> None:
        """Raises ValueError when `window` is not positive."""
        super().__init__(trace.num_layers, trace.num_experts)
        if window is not None and window < 1:
            raise ValueError(f"window is {window}; at least 1 step is needed")
        self._window = trace.num_tokens if window is None else window
        self._topk = trace.topk
        self._next_of_used, self._next_use = _next_uses(trace)
        self._last_pos = np.full((trace.num_layers, trace.num_experts), -1, dtype=np.int64)
        self._never = trace.num_tokens
        for layer in range(trace.num_layers):
            self._rate(layer, step=-1)

    def observe(self, layer: int, tokens_per_expert: npt.NDArray[np.int64]) -> None:
        step = int(self.passes[layer])
        self.passes[layer] += 1
        used = self._topk[step, layer]
        assert tokens_per_expert[used].all(), f"step {step} of layer {layer} is not the trace's"
        self._next_use[layer, used] = self._next_of_used[step, layer]
        self._last_pos[layer, used] = step * len(self.passes) + layer
        self._rate(layer, step)

    def _rate(self, layer: int, step: int) -> None:
        num_layers = len(self.passes)
        next_use = self._next_use[layer]
        is_seen = (next_use <= step + self._window) & (next_use < self._never)
        unseen = self._last_pos[layer] - 2.0 * self._never * num_layers  # below every pos of the trace
        self.score[layer] = np.where(is_seen, -(next_use * num_layers + layer), unseen)


class OracleScore(EvictionPolicy):
    """SeqMoE §7.1's score with the truth for a forecast: what `belady` would be under a perfect predictor.

    Score: Σ λ^j · used_j / Σ λ^j over the next `window` steps of the layer; `decay` (λ) 1 makes it the
    frequency in the window. The paper's Belady-F8 is not this but `belady` itself, fed by the predictor.
    """

    name: ClassVar[str] = "oracle_score_8"

    def __init__(self, trace: Trace, *, window: int = 8, decay: float = 0.5) -> None:
        """Raises ValueError unless window >= 1 and 0 < decay <= 1."""
        super().__init__(trace.num_layers, trace.num_experts)
        if window < 1 or not 0 < decay <= 1:
            raise ValueError(f"window {window} must be at least 1, decay {decay} above 0 and at most 1")
        self._topk = trace.topk
        weights = decay ** np.arange(window, dtype=np.float64)
        self._weights = weights / weights.sum()
        for layer in range(trace.num_layers):
            self._rate(layer, step=-1)

    def observe(self, layer: int, tokens_per_expert: npt.NDArray[np.int64]) -> None:
        step = int(self.passes[layer])
        self.passes[layer] += 1
        assert tokens_per_expert[self._topk[step, layer]].all(), (
            f"step {step} of layer {layer} is not the trace's"
        )
        self._rate(layer, step)

    def _rate(self, layer: int, step: int) -> None:
        coming = self._topk[step + 1 : step + 1 + len(self._weights), layer]  # [steps, top_k]
        weights = np.repeat(self._weights[: len(coming)], coming.shape[1])
        self.score[layer] = np.bincount(coming.reshape(-1), weights, minlength=self.score.shape[1])


def make_oracle(name: str, trace: Trace) -> EvictionPolicy:
    """The oracle called `name` for `trace`. Raises ValueError for a name that is none."""
    if name == "oracle_belady":
        return OracleBelady(trace)
    if name == "oracle_belady_8":
        return OracleBelady(trace, window=8)
    if name == "oracle_score_8":
        return OracleScore(trace)
    raise ValueError(f"unknown oracle {name!r}; known: {', '.join(ORACLES)}")


def _next_uses(trace: Trace) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
    """(step of the next use of each used expert `[T, L, K]`, step of the first use of each expert `[L, E]`);
    T where there is none."""
    num_tokens = trace.num_tokens
    following = np.empty(trace.topk.shape, dtype=np.int32)
    upcoming = np.full((trace.num_layers, trace.num_experts), num_tokens, dtype=np.int64)
    for step in range(num_tokens - 1, -1, -1):
        used = trace.topk[step].astype(np.int64)
        following[step] = np.take_along_axis(upcoming, used, axis=1)
        np.put_along_axis(upcoming, used, step, axis=1)
    return following, upcoming
