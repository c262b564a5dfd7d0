"""Bests and leasts of one layer's experts, held in the registers of one warp.

Ties are broken as on the host, by index in the end, so no reduction's own order decides anything. A vector of
experts is `[EXPERT_BLOCK]`; `NOBODY`, no expert, is EXPERT_BLOCK here, which equals no element of `experts`.

Floats are compared as integers of the same order (`order_of`): a warp reduces those in one instruction, where
floats take five exchanges between its threads.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"
# ruff: noqa: N803 (compile-time constants are written in capitals)

from __future__ import annotations

import triton
import triton.language as tl

_LEAST, _MOST = tl.constexpr(-(2**31)), tl.constexpr(2**31 - 1)
"""Below and above what `order_of` gives."""


@triton.jit
def any_of(is_so):
    """Whether any element is."""
    return tl.max(is_so.to(tl.int32), axis=0) > 0


@triton.jit
def order_of(values):
    """int32 in the order of float32 `values`; equal for -0 and 0, as they are."""
    bits = tl.where(values == 0, 0.0, values).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def first(is_so, experts, EXPERT_BLOCK: tl.constexpr):
    """The lowest expert that is; NOBODY if none is."""
    return tl.min(tl.where(is_so, experts, EXPERT_BLOCK), axis=0)


@triton.jit
def best_left(order, is_done, experts, EXPERT_BLOCK: tl.constexpr):
    """The best of what is not done, ties to the lowest; NOBODY when all is done. `order`: of the scores."""
    best = tl.max(tl.where(is_done, _LEAST, order), axis=0)
    return first((is_done == 0) & (order == best), experts, EXPERT_BLOCK)


@triton.jit
def best_by_router(biased, order, place, is_done, experts, EXPERT_BLOCK: tl.constexpr):
    """The best of what is not done: by `biased`, ties by the router's own ranking (score, place, index).

    `biased` and `order`: the orders of the scores with and without what residency adds.
    """
    is_best = (is_done == 0) & (biased == tl.max(tl.where(is_done, _LEAST, biased), axis=0))
    ranking = place * EXPERT_BLOCK + experts
    ranked = tl.min(tl.where(is_best, ranking, _MOST), axis=0)
    if tl.sum(is_best.to(tl.int32), axis=0) > 1:  # seldom, and else one reduction less to wait for
        is_best = is_best & (order == tl.max(tl.where(is_best, order, _LEAST), axis=0))
        ranked = tl.min(tl.where(is_best, ranking, _MOST), axis=0)
    return tl.where(ranked == _MOST, EXPERT_BLOCK, ranked % EXPERT_BLOCK)


@triton.jit
def least(order, is_candidate, experts, EXPERT_BLOCK: tl.constexpr):
    """The candidate of least priority, ties to the lowest; NOBODY for none. `order`: of priorities."""
    lowest = tl.min(tl.where(is_candidate, order, _MOST), axis=0)
    return first(is_candidate & (order == lowest), experts, EXPERT_BLOCK)


@triton.jit
def step_priority(fast, slow, share):
    """Priorities A of a step that begins, from both averages and a uint8. 256ths are exact, so it is no
    matter whether product and sum are rounded once or twice. LRU's are the last use."""
    return fast + slow + share.to(tl.float32) * 0.00390625
