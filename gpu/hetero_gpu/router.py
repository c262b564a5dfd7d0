"""From router logits to weights and experts in one launch: softmax, top-k, renormalisation.

Equal logits are no rarity in bf16. Among equals the expert of lower index is taken, which is what
`torch.topk` does on CUDA where the last places are tied.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"
# ruff: noqa: N803 (compile-time constants are written in capitals)

from __future__ import annotations

import torch
import triton
import triton.language as tl


def route(
    logits: torch.Tensor, *, top_k: int, is_renormalised: bool, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights `[tokens, top_k]` of type `dtype` and expert indices (int64), best first.

    `logits` `[tokens, experts]`. Weights are softmax probabilities over all experts, or, renormalised, over
    the chosen.
    """
    tokens, experts = logits.shape
    if not 0 < top_k <= experts:
        raise ValueError(f"top-{top_k} of {experts} experts")
    weights = logits.new_empty((tokens, top_k), dtype=dtype)
    indices = logits.new_empty((tokens, top_k), dtype=torch.int64)
    _route_token[(tokens,)](
        logits.contiguous(),
        weights,
        indices,
        IS_RENORMALISED=is_renormalised,
        EXPERTS=experts,
        SLOTS=triton.next_power_of_2(experts),
        TOP_K=top_k,
        CHOSEN=triton.next_power_of_2(top_k),
        num_warps=1,
    )
    return weights, indices


def route_reference(
    logits: torch.Tensor, *, top_k: int, is_renormalised: bool, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same in torch."""
    probabilities = logits.float().softmax(-1)
    order = probabilities.sort(dim=-1, descending=True, stable=True)
    weights, indices = order.values[:, :top_k], order.indices[:, :top_k]
    if is_renormalised:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights.to(dtype), indices


@triton.jit
def _route_token(
    logit_pointer,
    weight_pointer,
    index_pointer,
    IS_RENORMALISED: tl.constexpr,
    EXPERTS: tl.constexpr,
    SLOTS: tl.constexpr,
    TOP_K: tl.constexpr,
    CHOSEN: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    experts = tl.arange(0, SLOTS)
    logits = tl.load(
        logit_pointer + token * EXPERTS + experts, mask=experts < EXPERTS, other=float("-inf")
    ).to(tl.float32)
    shares = tl.exp(logits - tl.max(logits, 0))
    total = tl.sum(shares, 0)
    places = tl.arange(0, CHOSEN)
    weights = tl.zeros((CHOSEN,), tl.float32)
    indices = tl.zeros((CHOSEN,), tl.int32)
    for place in tl.static_range(TOP_K):
        best = tl.argmax(logits, 0, tie_break_left=True)
        share = tl.sum(tl.where(experts == best, shares, 0.0), 0)
        weights = tl.where(places == place, share, weights)
        indices = tl.where(places == place, best, indices)
        logits = tl.where(experts == best, float("-inf"), logits)
    if IS_RENORMALISED:
        total = tl.sum(weights, 0)
    is_chosen = places < TOP_K
    tl.store(weight_pointer + token * TOP_K + places, weights / total, mask=is_chosen)
    tl.store(index_pointer + token * TOP_K + places, indices.to(tl.int64), mask=is_chosen)
