"""From router logits, or from hidden states, to weights and experts in one launch.

    hidden ─► product, a few experts a program ─► logits ─► the last program to finish: softmax, top-k,
              (as many as fill the device)                  renormalisation, token by token

Which program is the last is a matter of timing; what it computes is not. Other programs of the same launch
may compute what the next layer's router says of the same hidden states, for who looks a layer ahead.

Equal logits are no rarity in bf16. Among equals the expert of lower index is taken, which is what
`torch.topk` does on CUDA where the last places are tied.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"
# ruff: noqa: N803, N806, RET505 (upper case marks what the compiler knows; a branch on it needs its else)

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hetero_gpu.linear import LinearTile, linear, load_lane, store_products
from hetero_gpu.overlap import meet, overlap_options
from hetero_gpu.weigh import WeightRule, weigh

MOST_EXPERTS = 0x2000
"""Their number fits into the bits that a half, widened to float32, leaves free."""

_LOW, _HIGH = tl.constexpr(MOST_EXPERTS - 1), tl.constexpr(-MOST_EXPERTS)
"""Masks of those bits and of the others."""

MOST_TOKENS = 1
"""For more, programs that each choose for one token are worth a launch of their own."""

ROUTER_TILE = LinearTile(1, 2048, 4)
"""Small, so that a matrix of half a megabyte occupies many programs."""


def route(
    logits: torch.Tensor, *, top_k: int, is_renormalised: bool, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights `[tokens, top_k]` of type `dtype` and expert indices (int64), best first.

    `logits` `[tokens, experts]`. Weights are softmax probabilities over all experts, or, renormalised, over
    the chosen.
    """
    tokens, experts = logits.shape
    if not 0 < top_k <= experts <= MOST_EXPERTS:
        raise ValueError(f"top-{top_k} of {experts} experts, which may be {MOST_EXPERTS} at most")
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
        if not 0 < top_k <= weight.shape[0] <= MOST_EXPERTS:
            raise ValueError(f"top-{top_k} of {weight.shape[0]} experts, which may be {MOST_EXPERTS} at most")
        self._weight, self._bias = weight.contiguous(), bias
        self._top_k, self._is_renormalised, self._dtype = top_k, is_renormalised, dtype
        self._programs_done = torch.zeros(1, dtype=torch.int32, device=weight.device)

    def __call__(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Logits `[tokens, experts]` of `hidden` `[tokens, size]`; weights and indices as from `route`."""
        if hidden.shape[0] <= MOST_TOKENS:
            logits, weights, indices, _ = self._in_one_launch(hidden, None)
            return logits, weights, indices
        logits = self.logits(hidden)
        return logits, *self.choose(logits)

    def with_next(
        self, hidden: torch.Tensor, following: Router
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """The same, and the logits of `following`, a router of the same shape, for the same `hidden`."""
        if hidden.shape[0] <= MOST_TOKENS:
            return self._in_one_launch(hidden, following)
        return *self(hidden), following.logits(hidden)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits `[tokens, experts]` alone."""
        return linear(hidden, self._weight, self._bias)

    def choose(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights and indices as from `route`."""
        return route(logits, top_k=self._top_k, is_renormalised=self._is_renormalised, dtype=self._dtype)

    def weigh(self, logits: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """Weights `[tokens, top_k]` by this router's rule of `experts` that somebody else chose."""
        return weigh(logits, experts, rule=WeightRule(self._is_renormalised), dtype=self._dtype)

    def _in_one_launch(
        self, hidden: torch.Tensor, following: Router | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Logits, weights, indices, and the logits of `following`; empty where that is None."""
        tokens, (experts, size) = hidden.shape[0], self._weight.shape
        logits = hidden.new_empty((tokens, experts))
        next_logits = hidden.new_empty((tokens, experts if following is not None else 0))
        num_programs = triton.cdiv(experts, ROUTER_TILE.rows)
        weights = hidden.new_empty((tokens, self._top_k), dtype=self._dtype)
        indices = hidden.new_empty((tokens, self._top_k), dtype=torch.int64)
        _route_hidden[(num_programs if following is None else 2 * num_programs,)](
            hidden.contiguous(),
            self._weight,
            self._weight if self._bias is None else self._bias,
            logits,
            weights,
            indices,
            self._programs_done,
            None if following is None else following._weight,
            None if following is None else following._bias,
            next_logits,
            NUM_PROGRAMS=num_programs,
            HAS_BIAS=self._bias is not None,
            IS_RENORMALISED=self._is_renormalised,
            HIDDEN=size,
            EXPERTS=experts,
            SLOTS=triton.next_power_of_2(experts),
            TOP_K=self._top_k,
            CHOSEN=triton.next_power_of_2(self._top_k),
            TOKENS=tokens,
            TOKEN_SLOTS=triton.next_power_of_2(tokens),
            LANE=load_lane(self._weight),
            TILE=ROUTER_TILE,
            num_warps=ROUTER_TILE.num_warps,
            **overlap_options(hidden.device),
        )
        return logits, weights, indices, next_logits


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
    CHOSEN: tl.constexpr,
):
    """One token, from memory to memory."""
    experts, places = tl.arange(0, SLOTS), tl.arange(0, CHOSEN)
    stored = tl.load(logits + experts, mask=experts < EXPERTS, other=float("-inf"))
    shares, index = chosen_of(stored, IS_RENORMALISED, SLOTS, TOP_K, CHOSEN)
    tl.store(weights + places, shares, mask=places < TOP_K)
    tl.store(indices + places, index.to(tl.int64), mask=places < TOP_K)


@triton.jit
def chosen_of(
    stored,
    IS_RENORMALISED: tl.constexpr,
    SLOTS: tl.constexpr,
    TOP_K: tl.constexpr,
    CHOSEN: tl.constexpr,
):
    """Of logits `stored` `[SLOTS]`, -inf where there is no expert: weights and experts (int32), best first.

    Both `[CHOSEN]`, the first TOP_K of which mean something; other weights are 0. A logit that is no number
    is chosen last, and makes all weights no numbers.
    """
    places = tl.arange(0, CHOSEN)
    values, index = best_of(stored, SLOTS, TOP_K, CHOSEN)
    loaded = stored.to(tl.float32)
    values = tl.where(places < TOP_K, values, float("-inf"))
    peak = tl.max(values, 0)
    shares = tl.exp(values - peak)
    if IS_RENORMALISED:
        total = tl.sum(shares, 0) + tl.sum(tl.where(loaded != loaded, loaded, 0.0), 0)
    else:
        total = tl.sum(tl.exp(loaded - peak), 0)
    return shares / total, index


@triton.jit
def is_last_of(programs_done, NUM_PROGRAMS: tl.constexpr):
    """Whether all others of NUM_PROGRAMS, each of which asks once, have written what they had to; it then
    sees that. Whoever is the last makes the count ready for the next launch."""
    tl.debug_barrier()  # all threads have written before one of them says so
    is_last = tl.atomic_add(programs_done, 1, sem="acq_rel") == NUM_PROGRAMS - 1
    if is_last:
        tl.store(programs_done, 0)
    return is_last


@triton.jit
def best_of(stored, SLOTS: tl.constexpr, TOP_K: tl.constexpr, CHOSEN: tl.constexpr):
    """The TOP_K greatest of `stored` `[SLOTS]` and their experts (int32), best first, ties to the lower one;
    both `[CHOSEN]`, the first TOP_K of which mean something. What is no number is chosen last."""
    experts, places = tl.arange(0, SLOTS), tl.arange(0, CHOSEN)
    IS_SHORT: tl.constexpr = stored.dtype.primitive_bitwidth == 16
    LEAST: tl.constexpr = -(2**31) if IS_SHORT else -(2**62)
    keys = _keys(stored.to(tl.float32), experts, IS_SHORT)
    chosen = tl.zeros((CHOSEN,), keys.dtype)
    for place in tl.static_range(TOP_K):
        best = tl.max(keys, 0)
        chosen = tl.where(places == place, best, chosen)
        keys = tl.where(keys == best, LEAST, keys)
    return _taken_apart(chosen, IS_SHORT)


@triton.jit
def _keys(logits, experts, IS_SHORT: tl.constexpr):
    """Integers in the order of choice, all different: logit above, expert below, the lower one greater.

    A float's bits are in order but for the sign. Halves, widened, leave 13 bits free for the expert.
    """
    logits = tl.where(logits == logits, logits, float("-inf"))
    bits = tl.where(logits == 0, 0.0, logits).to(tl.int32, bitcast=True)  # both zeros are the same
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    if IS_SHORT:
        return (order & _HIGH) | (experts ^ _LOW)
    else:
        return (order.to(tl.int64) << 13) | (experts ^ _LOW)


@triton.jit
def _taken_apart(keys, IS_SHORT: tl.constexpr):
    """Logits (float32) and experts of keys."""
    if IS_SHORT:
        order = keys & _HIGH
        bits = (order ^ ((order >> 31) & 0x7FFFFFFF)) & _HIGH
    else:
        order = (keys >> 13).to(tl.int32)
        bits = order ^ ((order >> 31) & 0x7FFFFFFF)
    return bits.to(tl.float32, bitcast=True), (keys & _LOW).to(tl.int32) ^ _LOW


@triton.jit
def _route_token(
    logits,
    weights,
    indices,
    IS_RENORMALISED: tl.constexpr,
    EXPERTS: tl.constexpr,
    SLOTS: tl.constexpr,
    TOP_K: tl.constexpr,
    CHOSEN: tl.constexpr,
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
        CHOSEN,
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
    next_weight,
    next_bias,
    next_logits,
    NUM_PROGRAMS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_RENORMALISED: tl.constexpr,
    HIDDEN: tl.constexpr,
    EXPERTS: tl.constexpr,
    SLOTS: tl.constexpr,
    TOP_K: tl.constexpr,
    CHOSEN: tl.constexpr,
    TOKENS: tl.constexpr,
    TOKEN_SLOTS: tl.constexpr,
    LANE: tl.constexpr,
    TILE: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    program = tl.program_id(0)
    if program < NUM_PROGRAMS:
        experts = program * TILE.rows + tl.arange(0, TILE.rows)
        store_products(
            hidden, weight, bias, logits, experts, HAS_BIAS,
            HIDDEN, EXPERTS, TOKENS, TOKEN_SLOTS, LANE, TILE, OVERLAPS,
        )  # fmt: skip
        if is_last_of(programs_done, NUM_PROGRAMS):
            for token in tl.range(0, TOKENS):
                _choose(
                    logits + token * EXPERTS,
                    weights + token * TOP_K,
                    indices + token * TOP_K,
                    IS_RENORMALISED,
                    EXPERTS,
                    SLOTS,
                    TOP_K,
                    CHOSEN,
                )
    elif next_weight is not None:
        experts = (program - NUM_PROGRAMS) * TILE.rows + tl.arange(0, TILE.rows)
        store_products(
            hidden, next_weight, next_bias, next_logits, experts, next_bias is not None,
            HIDDEN, EXPERTS, TOKENS, TOKEN_SLOTS, LANE, TILE, OVERLAPS,
        )  # fmt: skip
