"""What a logical cache remembers, as arrays that the compiled step can change."""

from __future__ import annotations

from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt

from hetero_scheduler.routing.base import Shape

NOBODY = -1


class State(NamedTuple):
    """Of all layers; a step changes the row of its layer alone."""

    is_resident: npt.NDArray[np.bool_]
    """R: in the logical cache. `[L, E]`, always `capacity` of them a layer."""
    priority: npt.NDArray[np.float32]
    """p of the step under way. `[L, E]`"""
    fast: npt.NDArray[np.float32]
    slow: npt.NDArray[np.float32]
    """Moving averages of the router's own top-k. `[L, E]`"""
    last_use: npt.NDArray[np.int32]
    """Step in which an expert was executed or inserted last. `[L, E]`"""
    clock: npt.NDArray[np.int32]
    """Steps done. `[L]`"""
    range_sum: npt.NDArray[np.float64]
    """Of the scores' ranges so far. `[L]`"""
    is_begun: npt.NDArray[np.bool_]
    """Whether a step is under way. `[L]`"""
    is_guarded: npt.NDArray[np.bool_]
    """B of the step under way: what the pre-gate visited. `[L, E]`"""
    is_inserted: npt.NDArray[np.bool_]
    """Of these, what it brought in. `[L, E]`"""
    guess: npt.NDArray[np.int64]
    """The pre-gate's best of the step under way, NOBODY without one. `[L, top_k]`"""

    @classmethod
    def empty(cls, shape: Shape) -> Self:
        """Nothing resident, nothing seen."""
        num_layers, num_experts, top_k = shape
        experts = (num_layers, num_experts)
        return cls(
            is_resident=np.zeros(experts, np.bool_),
            priority=np.zeros(experts, np.float32),
            fast=np.zeros(experts, np.float32),
            slow=np.zeros(experts, np.float32),
            last_use=np.zeros(experts, np.int32),
            clock=np.zeros(num_layers, np.int32),
            range_sum=np.zeros(num_layers, np.float64),
            is_begun=np.zeros(num_layers, np.bool_),
            is_guarded=np.zeros(experts, np.bool_),
            is_inserted=np.zeros(experts, np.bool_),
            guess=np.full((num_layers, top_k), NOBODY, np.int64),
        )

    def reset(self, warm: npt.NDArray[np.bool_]) -> None:
        """Back to the start of a request, `warm` `[L, E]` resident."""
        for array in self:
            array.fill(0)
        self.guess.fill(NOBODY)
        self.is_resident[:] = warm
