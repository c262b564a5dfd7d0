"""Weights of experts that somebody else has chosen, from a softmax router's logits, in one launch."""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"
# ruff: noqa: N803 (compile-time constants are written in capitals)

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hetero_gpu.overlap import meet, overlap_options


def weigh(
    logits: torch.Tensor, experts: torch.Tensor, *, is_renormalised: bool, dtype: torch.dtype
) -> torch.Tensor:
    """Softmax weights `[tokens, top_k]` of type `dtype` of `experts` (int64 `[tokens, top_k]`), over all that
    have a logit (`[tokens, experts]`) or, renormalised, over themselves. Asynchronous, capturable."""
    tokens, num_experts = logits.shape
    top_k = experts.shape[1]
    weights = logits.new_empty((tokens, top_k), dtype=dtype)
    _weigh_token[(tokens,)](
        logits.contiguous(),
        experts.contiguous(),
        weights,
        IS_RENORMALISED=is_renormalised,
        EXPERTS=num_experts,
        SLOTS=triton.next_power_of_2(num_experts),
        TOP_K=top_k,
        CHOSEN=triton.next_power_of_2(top_k),
        num_warps=1,
        **overlap_options(logits.device),
    )
    return weights


def weigh_reference(
    logits: torch.Tensor, experts: torch.Tensor, *, is_renormalised: bool, dtype: torch.dtype
) -> torch.Tensor:
    """The same in torch."""
    weights = logits.float().softmax(-1).gather(1, experts)
    if is_renormalised:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights.to(dtype)


@triton.jit
def _weigh_token(
    logits,
    experts,
    weights,
    IS_RENORMALISED: tl.constexpr,
    EXPERTS: tl.constexpr,
    SLOTS: tl.constexpr,
    TOP_K: tl.constexpr,
    CHOSEN: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    meet(OVERLAPS)
    token = tl.program_id(0).to(tl.int64)
    slots, places = tl.arange(0, SLOTS), tl.arange(0, CHOSEN)
    is_place = places < TOP_K
    of_token = logits + token * EXPERTS
    said = tl.load(of_token + slots, mask=slots < EXPERTS, other=float("-inf")).to(tl.float32)
    chosen = tl.load(experts + token * TOP_K + places, mask=is_place, other=0)
    said_of_chosen = tl.load(of_token + chosen, mask=is_place, other=float("-inf")).to(tl.float32)
    peak = tl.max(said_of_chosen, 0) if IS_RENORMALISED else tl.max(said, 0)
    shares = tl.exp(said_of_chosen - peak)
    total = tl.sum(shares, 0) if IS_RENORMALISED else tl.sum(tl.exp(said - peak), 0)
    tl.store(weights + token * TOP_K + places, shares / total, mask=is_place)
