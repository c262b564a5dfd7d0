"""The logical cache of one request: what routing sees (PSR §4)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hetero_scheduler.routing.base import RoutingPolicy, Shape
from hetero_scheduler.routing.calibration import Calibration
from hetero_scheduler.routing.scan import Decided, Heard, Tables, scan, steer
from hetero_scheduler.routing.state import State

Decisions = Decided
_NO_GUESSES = np.empty((0, 0, 0), np.float32)


class LogicalCache:
    """`policy` on one request of a model of `shape`, with `capacity` (C) experts a layer resident.

    The order for token t: `steer(l, ...)`, if the policy looks ahead, any time after token t - 1 passed layer
    l; then `select` for layer l. Or `select` with `guesses`, which does both, for any number of tokens: the
    decisions are the same. Not thread-safe. Raises ValueError for a capacity that no layer can run
    with, and for parts of another shape.
    """

    def __init__(
        self, policy: RoutingPolicy, shape: Shape, *, capacity: int, calibration: Calibration
    ) -> None:
        num_layers, num_experts, top_k = shape
        if not top_k <= capacity <= num_experts:
            raise ValueError(
                f"capacity is {capacity}; give {top_k} (the top-k) to {num_experts} (all experts)"
            )
        if calibration.uses.shape != (num_layers, num_experts):
            raise ValueError(f"the calibration is of {calibration.uses.shape}, the model is {shape}")
        if policy.rules.protected > top_k:
            raise ValueError(f"protected is {policy.rules.protected}; give at most {top_k}, the top-k")
        self.policy, self.shape, self.capacity = policy, shape, capacity
        self._rules, self.prior = policy.rules, calibration.prior
        self.tables = Tables(
            (policy.rules.bonus * calibration.score_range).astype(np.float32), calibration.prior.share
        )
        self._warm = calibration.warm_set(capacity)
        self.state = State.empty(shape)
        """For whoever goes on elsewhere with the same step; changed by decisions, and by nobody else here."""
        self.reset()

    def reset(self) -> None:
        """A new request: the warm set resident, nothing seen."""
        self.state.reset(self._warm)

    def steer(self, layer: int, guess: npt.NDArray[np.float32], token: int) -> npt.NDArray[np.int64]:
        """Part 1 of Algorithm 1, for the coming `select` of `layer`: which experts it inserts.

        `guess` float32 `[E]`: the scores of `layer`'s router on the layer before's MoE input. `token`: the
        input token.
        """
        steer(self._rules, self.state, layer, guess, self.tables.prior[self.prior.row(token), layer])
        inserted: npt.NDArray[np.int64] = self.state.is_inserted[layer].nonzero()[0]
        return inserted

    def select(
        self,
        scores: npt.NDArray[np.float32],
        own: npt.NDArray[np.int64],
        tokens: npt.NDArray[np.integer],
        *,
        first_layer: int,
        guesses: npt.NDArray[np.float32] | None = None,
    ) -> Decisions:
        """Decide `T` tokens, in their order, in the layers from `first_layer` on.

        `scores` float32 `[T, n, E]`: what the router takes its top-k of, -inf where it excludes an expert.
        `own` int64 `[T, n, top_k]`: what it takes. `tokens` `[T]`: input tokens. `guesses` float32
        `[T, n, E]`: as for `steer`; ignored for the first layer of the model and by a policy that does not
        look ahead. All C-contiguous.
        """
        num_tokens, num_layers, _ = scores.shape
        assert guesses is None or guesses.shape == scores.shape, f"guesses {guesses.shape} of {scores.shape}"
        heard = Heard(
            scores,
            own,
            guesses if guesses is not None and self.policy.looks_ahead else _NO_GUESSES,
            self.prior.rows(tokens),
        )
        decided = Decided(np.empty_like(own), *np.empty((3, num_tokens, num_layers), np.int32))
        scan(self._rules, self.tables, self.state, first_layer, heard, decided)
        return decided

    def residents(self, layer: int) -> npt.NDArray[np.int64]:
        """Experts of `layer` in the cache, ascending; always `capacity` of them."""
        return np.flatnonzero(self.state.is_resident[layer])

    def is_resident(self) -> npt.NDArray[np.bool_]:
        """Of each expert. A view, `[L, E]`: read it, and not after the next decision."""
        return self.state.is_resident

    def priority(self, layer: int) -> npt.NDArray[np.float32]:
        """Priorities of the last step of `layer`. A view, `[E]`."""
        priority: npt.NDArray[np.float32] = self.state.priority[layer]
        return priority
