"""The scores that the uses of experts leave behind, for policies whose scores change at uses only.

`needed` is `[tokens, layers, top_k]`, ascending along top_k; scores are float64 of that shape: what the
policy's own `observe` sets, for a whole trace at once.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numba
import numpy as np
import numpy.typing as npt

from hetero_scheduler.eviction.lfru import Lfru

Experts = npt.NDArray[np.int32]
Scores = npt.NDArray[np.float64]
FAST_POLICIES = ("lru", "lfu", "lfru", "oracle_belady", "oracle_belady_8")


class UseScores(NamedTuple):
    """`at_use[t, l, k]`: the score of the k-th expert of (t, l) from that use on. `in_sight[t, l, k]`: what
    it becomes `window` steps before that use, NaN where it stays; None for a policy without a window."""

    at_use: Scores
    in_sight: Scores | None = None
    window: int = 0


def use_scores(policy: str, needed: Experts, *, num_experts: int) -> UseScores:
    """Scores of one of FAST_POLICIES. Raises ValueError for any other."""
    if policy == "lru":
        return UseScores(_positions(needed) + 1.0)
    if policy == "lfu":
        at_use = np.empty(needed.shape)
        _count_uses(needed, np.zeros((needed.shape[1], num_experts)), at_use)
        return UseScores(at_use)
    if policy == "lfru":
        return UseScores(_lfru_scores(needed, num_experts))
    if policy == "oracle_belady":
        return _belady_scores(needed, num_experts, window=None)
    if policy == "oracle_belady_8":
        return _belady_scores(needed, num_experts, window=8)
    raise ValueError(f"no fast replay of {policy!r}; there are {', '.join(FAST_POLICIES)}")


def _positions(needed: Experts) -> Scores:
    """pos of each use."""
    num_tokens, num_layers, _ = needed.shape
    pos = np.arange(num_tokens * num_layers, dtype=np.float64).reshape(num_tokens, num_layers, 1)
    return np.broadcast_to(pos, needed.shape)


def _lfru_scores(needed: Experts, num_experts: int) -> Scores:
    """The policy's own arithmetic, one call for all layers of a token."""
    num_tokens, num_layers, _ = needed.shape
    policy, layers = Lfru(num_layers, num_experts), np.arange(num_layers)[:, None]
    at_use = np.empty(needed.shape)
    for t in range(num_tokens):
        used = (layers, needed[t])
        policy.score[used] = at_use[t] = np.logaddexp2(policy.score[used], (t + 1) / policy.half_life)
    return at_use


def _belady_scores(needed: Experts, num_experts: int, *, window: int | None) -> UseScores:
    """-pos of the next use; below all of these, by last use, what is not used again (or not within the
    window). Within the window an expert comes into sight `window` steps before it is used, without a use."""
    num_tokens, num_layers, _ = needed.shape
    last, following = np.empty(needed.shape, np.int32), np.empty(needed.shape, np.int32)
    _neighbours(needed, num_experts, last, following)
    pos, step = _positions(needed), np.arange(num_tokens)[:, None, None]
    is_seen = following < num_tokens
    if window is not None:
        is_seen &= following <= step + window
    next_pos = following.astype(np.float64) * num_layers + np.arange(num_layers)[:, None]
    at_use = np.where(is_seen, -next_pos, pos - 2.0 * num_tokens * num_layers)
    if window is None:
        return UseScores(at_use)
    return UseScores(at_use, np.where(last < step - window, -pos, np.nan), window)


@numba.njit(nogil=True, boundscheck=False)
def _count_uses(needed: Any, uses: Any, at_use: Any) -> None:
    num_tokens, num_layers, top_k = needed.shape
    for t in range(num_tokens):
        for layer in range(num_layers):
            for k in range(top_k):
                uses[layer, needed[t, layer, k]] += 1
                at_use[t, layer, k] = uses[layer, needed[t, layer, k]]


@numba.njit(nogil=True, boundscheck=False)
def _neighbours(needed: Any, num_experts: Any, last: Any, following: Any) -> None:
    """Step of the use before and of the use after each; -1 and the number of tokens where there is none."""
    num_tokens, num_layers, top_k = needed.shape
    for layer in range(num_layers):
        for k in range(top_k):
            following[:, layer, k] = num_tokens
        place = np.full((num_experts, 2), -1)  # step and k of the last use
        for t in range(num_tokens):
            for k in range(top_k):
                expert = needed[t, layer, k]
                before, at = place[expert]
                last[t, layer, k] = before
                if before >= 0:
                    following[before, layer, at] = t
                place[expert] = t, k
