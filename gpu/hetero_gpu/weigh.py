"""Weights of experts that somebody else has chosen, from a router's logits, in one launch.

softmax    shares of all experts' total or, renormalised, of the chosen's
sigmoid    as they are or, renormalised, as shares of the chosen's total
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"
# ruff: noqa: N803 (compile-time constants are written in capitals)

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from hetero_gpu.overlap import meet, overlap_options

_NO_ZERO = tl.constexpr(1e-20)
"""Added to the total of sigmoids, as transformers does."""


@dataclass(frozen=True)
class WeightRule:
    """How weights come out of logits: by which gate, over whose total, times what."""

    is_renormalised: bool
    is_sigmoid: bool = False
    scale: float = 1.0


def weigh(
    logits: torch.Tensor, experts: torch.Tensor, *, rule: WeightRule, dtype: torch.dtype
) -> torch.Tensor:
    """Weights `[tokens, top_k]` of type `dtype` of `experts` (int64 `[tokens, top_k]`) by their `logits`
    `[tokens, experts]`. Asynchronous, capturable."""
    tokens, num_experts = logits.shape
    top_k = experts.shape[1]
    weights = logits.new_empty((tokens, top_k), dtype=dtype)
    _weigh_token[(tokens,)](
        logits.contiguous(),
        experts.contiguous(),
        weights,
        RULE=rule,
        EXPERTS=num_experts,
        SLOTS=triton.next_power_of_2(num_experts),
        TOP_K=top_k,
        CHOSEN=triton.next_power_of_2(top_k),
        num_warps=1,
        **overlap_options(logits.device),
    )
    return weights


def weigh_reference(
    logits: torch.Tensor, experts: torch.Tensor, *, rule: WeightRule, dtype: torch.dtype
) -> torch.Tensor:
    """The same in torch."""
    gated = logits.float().sigmoid() if rule.is_sigmoid else logits.float().softmax(-1)
    weights = gated.gather(1, experts)
    if rule.is_renormalised:
        weights = weights / (weights.sum(-1, keepdim=True) + (1e-20 if rule.is_sigmoid else 0.0))
    return (weights * rule.scale).to(dtype)


@triton.jit
def _weigh_token(
    logits,
    experts,
    weights,
    RULE: tl.constexpr,
    EXPERTS: tl.constexpr,
    SLOTS: tl.constexpr,
    TOP_K: tl.constexpr,
    CHOSEN: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    meet(OVERLAPS)
    token = tl.program_id(0).to(tl.int64)
    places = tl.arange(0, CHOSEN)
    is_place = places < TOP_K
    chosen = tl.load(experts + token * TOP_K + places, mask=is_place, other=0)
    shares = shares_of(logits + token * EXPERTS, chosen, is_place, RULE, EXPERTS, SLOTS)
    tl.store(weights + token * TOP_K + places, shares, mask=is_place)


@triton.jit
def shares_of(logits, chosen, is_place, RULE: tl.constexpr, EXPERTS: tl.constexpr, SLOTS: tl.constexpr):
    """float32 weights of the `chosen` that are `is_place`, by the `logits` of one token, in memory."""
    said_of_chosen = tl.load(logits + chosen, mask=is_place, other=float("-inf")).to(tl.float32)
    if RULE.is_sigmoid:
        shares = tl.sigmoid(said_of_chosen)
        if RULE.is_renormalised:
            shares = shares / (tl.sum(shares, 0) + _NO_ZERO)
    else:
        slots = tl.arange(0, SLOTS)
        said = tl.load(logits + slots, mask=slots < EXPERTS, other=float("-inf")).to(tl.float32)
        peak = tl.max(said_of_chosen, 0) if RULE.is_renormalised else tl.max(said, 0)
        shares = tl.exp(said_of_chosen - peak)
        total = tl.sum(shares, 0) if RULE.is_renormalised else tl.sum(tl.exp(said - peak), 0)
        shares = shares / total
    return shares * RULE.scale
