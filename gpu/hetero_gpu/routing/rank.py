"""Bests and leasts of one layer's experts, held in the registers of one thread block.

Ties are broken as on the host, by index in the end, so no reduction's own order decides anything. A vector of
experts is `[EXPERT_BLOCK]`; `NOBODY`, no expert, is EXPERT_BLOCK here, which equals no element of `experts`.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def any_of(is_so):  # type: ignore[no-untyped-def]
    """Whether any element is."""
    return tl.max(is_so.to(tl.int32), axis=0) > 0


@triton.jit  # type: ignore[untyped-decorator]
def first(is_so, experts, EXPERT_BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """The lowest expert that is; NOBODY if none is."""
    return tl.min(tl.where(is_so, experts, EXPERT_BLOCK), axis=0)


@triton.jit  # type: ignore[untyped-decorator]
def best_left(scores, is_done, experts, EXPERT_BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """The best of what is not done, ties to the lowest; NOBODY when all is done."""
    best = tl.max(tl.where(is_done, float("-inf"), scores), axis=0)
    return first((is_done == 0) & (scores == best), experts, EXPERT_BLOCK)


@triton.jit  # type: ignore[untyped-decorator]
def best_by_router(biased, scores, place, is_done, experts, EXPERT_BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """The best of what is not done: by `biased`, ties by the router's own ranking (score, place, index)."""
    is_best = (is_done == 0) & (biased == tl.max(tl.where(is_done, float("-inf"), biased), axis=0))
    is_best = is_best & (scores == tl.max(tl.where(is_best, scores, float("-inf")), axis=0))
    is_best = is_best & (place == tl.min(tl.where(is_best, place, EXPERT_BLOCK), axis=0))
    return first(is_best, experts, EXPERT_BLOCK)


@triton.jit  # type: ignore[untyped-decorator]
def least(priority, is_candidate, experts, EXPERT_BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """The candidate of least priority, ties to the lowest; NOBODY when there is none."""
    lowest = tl.min(tl.where(is_candidate, priority, float("inf")), axis=0)
    return first(is_candidate & (priority == lowest), experts, EXPERT_BLOCK)


@triton.jit  # type: ignore[untyped-decorator]
def step_priority(fast, slow, last_use, share, IS_LRU: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """Priorities of a step that begins. float32 of int32 and uint8; 256ths are exact, so it is no matter
    whether product and sum are rounded once or twice."""
    return last_use.to(tl.float32) if IS_LRU else fast + slow + share.to(tl.float32) * 0.00390625
