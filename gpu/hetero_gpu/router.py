"""From router logits, or from hidden states, to weights and experts in one launch.

    hidden ─► product, a few experts a program ─► logits ─► the last program to finish: softmax, top-k,
              (as many as fill the device)                  renormalisation, token by token

Which program is the last is a matter of timing; what it computes is not. Equal logits are no rarity in bf16.
Among equals the expert of lower index is taken, which is what `torch.topk` does on CUDA where the last places
are tied.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"
# ruff: noqa: N803 (compile-time constants are written in capitals)

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hetero_gpu.linear import LinearTile, linear, load_lane, store_products
from hetero_gpu.overlap import meet, overlap_options

_RANKED = tl.constexpr(32)
"""Experts that one step of the ranking compares with all."""

MOST_TOKENS = 1
"""For more, programs that each choose for one token are worth a launch of their own."""

_TILE = LinearTile(1, 2048, 4)
"""Small, so that a matrix of half a megabyte occupies many programs."""


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
        num_warps=4,
        **overlap_options(logits.device),
    )
    return weights, indices


class Router:
    """The whole router of one layer: one launch for up to `MOST_TOKENS` tokens, fit for a CUDA graph.

    `weight` `[experts, size]`, `bias` `[experts]` or None. The kernel launched just before may not write
    the weight. Calls may not overlap: a count of programs is kept between them.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        *,
        top_k: int,
        is_renormalised: bool,
        dtype: torch.dtype,
    ) -> None:
        if not 0 < top_k <= weight.shape[0]:
            raise ValueError(f"top-{top_k} of {weight.shape[0]} experts")
        self._weight, self._bias = weight.contiguous(), bias
        self._top_k, self._is_renormalised, self._dtype = top_k, is_renormalised, dtype
        self._programs_done = torch.zeros(1, dtype=torch.int32, device=weight.device)

    def __call__(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Logits `[tokens, experts]` of `hidden` `[tokens, size]`; weights and indices as from `route`."""
        if hidden.shape[0] <= MOST_TOKENS:
            return self._in_one_launch(hidden)
        logits = linear(hidden, self._weight, self._bias)
        weights, indices = route(
            logits, top_k=self._top_k, is_renormalised=self._is_renormalised, dtype=self._dtype
        )
        return logits, weights, indices

    def _in_one_launch(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        tokens, (experts, size) = hidden.shape[0], self._weight.shape
        logits = hidden.new_empty((tokens, experts))
        weights = hidden.new_empty((tokens, self._top_k), dtype=self._dtype)
        indices = hidden.new_empty((tokens, self._top_k), dtype=torch.int64)
        _route_hidden[(triton.cdiv(experts, _TILE.rows),)](
            hidden.contiguous(),
            self._weight,
            self._weight if self._bias is None else self._bias,
            logits,
            weights,
            indices,
            self._programs_done,
            HAS_BIAS=self._bias is not None,
            IS_RENORMALISED=self._is_renormalised,
            HIDDEN=size,
            EXPERTS=experts,
            SLOTS=triton.next_power_of_2(experts),
            TOP_K=self._top_k,
            TOKENS=tokens,
            TOKEN_SLOTS=triton.next_power_of_2(tokens),
            LANE=load_lane(self._weight),
            TILE=_TILE,
            num_warps=_TILE.num_warps,
            **overlap_options(hidden.device),
        )
        return logits, weights, indices


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
def _choose(
    logits,
    weights,
    indices,
    IS_RENORMALISED: tl.constexpr,
    EXPERTS: tl.constexpr,
    SLOTS: tl.constexpr,
    TOP_K: tl.constexpr,
):
    """One token: experts whose rank is less than `TOP_K`, each written to the place that its rank says.

    The rank is how many experts come before: those of more, and among equals those of lower index. A logit
    that is no number comes last, so ranks are a permutation whatever the logits are, and makes all weights
    no numbers.
    """
    experts = tl.arange(0, SLOTS)
    loaded = _load_logits(logits, experts, EXPERTS)
    mine, is_nan = _ordered(loaded), loaded != loaded
    rank = tl.zeros((SLOTS,), tl.int32)
    for start in tl.range(0, EXPERTS, _RANKED):
        rivals = start + tl.arange(0, _RANKED)
        theirs = _ordered(_load_logits(logits, rivals, EXPERTS))
        is_more = theirs[:, None] > mine[None, :]
        is_earlier = (theirs[:, None] == mine[None, :]) & (rivals[:, None] < experts[None, :])
        rank += tl.sum((is_more | is_earlier).to(tl.int32), axis=0)  # in one thread
    is_chosen = (rank < TOP_K) & (experts < EXPERTS)
    shares = tl.exp(loaded - tl.max(mine, 0))
    counted = shares
    if IS_RENORMALISED:
        counted = tl.where(is_chosen | is_nan, shares, 0.0)
    tl.store(weights + rank, shares / tl.sum(counted, 0), mask=is_chosen)
    tl.store(indices + rank, experts.to(tl.int64), mask=is_chosen)


@triton.jit
def _ordered(logits):
    """What is no number compares as the least."""
    return tl.where(logits == logits, logits, float("-inf"))


@triton.jit
def _load_logits(logits, experts, EXPERTS: tl.constexpr):
    return tl.load(logits + experts, mask=experts < EXPERTS, other=float("-inf")).to(tl.float32)


@triton.jit
def _route_token(
    logits,
    weights,
    indices,
    IS_RENORMALISED: tl.constexpr,
    EXPERTS: tl.constexpr,
    SLOTS: tl.constexpr,
    TOP_K: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    meet(OVERLAPS)
    token = tl.program_id(0).to(tl.int64)
    _choose(
        logits + token * EXPERTS,
        weights + token * TOP_K,
        indices + token * TOP_K,
        IS_RENORMALISED,
        EXPERTS,
        SLOTS,
        TOP_K,
    )


@triton.jit
def _route_hidden(
    hidden,
    weight,
    bias,
    logits,
    weights,
    indices,
    programs_done,
    HAS_BIAS: tl.constexpr,
    IS_RENORMALISED: tl.constexpr,
    HIDDEN: tl.constexpr,
    EXPERTS: tl.constexpr,
    SLOTS: tl.constexpr,
    TOP_K: tl.constexpr,
    TOKENS: tl.constexpr,
    TOKEN_SLOTS: tl.constexpr,
    LANE: tl.constexpr,
    TILE: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    experts = tl.program_id(0) * TILE.rows + tl.arange(0, TILE.rows)
    store_products(
        hidden,
        weight,
        bias,
        logits,
        experts,
        HAS_BIAS,
        HIDDEN,
        EXPERTS,
        TOKENS,
        TOKEN_SLOTS,
        LANE,
        TILE,
        OVERLAPS,
    )
    tl.debug_barrier()  # all threads have written before one of them says so
    is_last = tl.atomic_add(programs_done, 1, sem="acq_rel") == tl.num_programs(0) - 1
    if is_last:
        tl.store(programs_done, 0)
        for token in tl.range(0, TOKENS):
            _choose(
                logits + token * EXPERTS,
                weights + token * TOP_K,
                indices + token * TOP_K,
                IS_RENORMALISED,
                EXPERTS,
                SLOTS,
                TOP_K,
            )
