"""One layer of a row: what its router chose goes in, what it will choose comes out."""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"
# ruff: noqa: N803, N806 (compile-time constants are written in capitals)

from __future__ import annotations

import triton
import triton.language as tl

from hetero_gpu.predict.blocks import apply_matrix, load_features, load_matrix, norm_features, output_of
from hetero_gpu.router import chosen_of


@triton.jit
def read_layer(row, layer, router_logits, weights, scratch, SIZES: tl.constexpr):
    """Take in what the layer's router said: `router_logits` `[experts]` of this row and layer."""
    experts = tl.arange(0, triton.next_power_of_2(SIZES.experts))
    logits = tl.load(router_logits + experts, mask=experts < SIZES.experts, other=float("-inf"))
    _take_in(logits.to(tl.float32), row, layer, weights, scratch, SIZES)


@triton.jit
def know_layer(layer, weights, SIZES: tl.constexpr):
    """What `predict_layer` reads that no forecast changes."""
    experts = tl.arange(0, triton.next_power_of_2(SIZES.experts))
    is_expert = experts < SIZES.experts
    own = layer * SIZES.experts + experts
    head = load_matrix(weights.head, own, is_expert, SIZES.width)
    bias = tl.load(weights.head_bias + own, mask=is_expert, other=float("-inf"))
    return head, bias, load_features(weights.final_norm, SIZES.width)


@triton.jit
def predict_layer(known, row, layer, step, probabilities, weights, scratch, SIZES: tl.constexpr):
    """`probabilities` `[experts]` at this row, step and layer; taken in where another step follows."""
    head, bias, norm = known
    experts = tl.arange(0, triton.next_power_of_2(SIZES.experts))
    hidden = output_of(SIZES.blocks - 1, row, scratch, SIZES)
    logits = bias + apply_matrix(head, norm_features(hidden, norm, SIZES.width))
    shares = tl.exp(logits - tl.max(logits, 0))
    tl.store(probabilities + experts, shares / tl.sum(shares, 0), mask=experts < SIZES.experts)
    if step + 1 < SIZES.horizon:
        _take_in(logits, row, layer, weights, scratch, SIZES)


@triton.jit
def clear_layer(probabilities, SIZES: tl.constexpr):
    """Nothing is expected of a row that is not active."""
    experts = tl.arange(0, triton.next_power_of_2(SIZES.experts))
    tl.store(probabilities + experts, tl.zeros_like(experts).to(tl.float32), mask=experts < SIZES.experts)


@triton.jit
def _take_in(logits, row, layer, weights, scratch, SIZES: tl.constexpr):
    """Activation-masked softmax of `logits` (-inf where there is no expert), through the input projection."""
    SLOTS: tl.constexpr = triton.next_power_of_2(SIZES.experts)
    CHOSEN: tl.constexpr = triton.next_power_of_2(SIZES.top_k)
    D: tl.constexpr = SIZES.width
    shares, chosen = chosen_of(logits, True, SLOTS, SIZES.top_k, CHOSEN)
    is_chosen = tl.arange(0, CHOSEN) < SIZES.top_k
    rows = load_matrix(weights.project, layer * SIZES.experts + chosen, is_chosen, D)
    features = tl.arange(0, triton.next_power_of_2(D))
    part = scratch.taken_in + (row * SIZES.layers + layer) * D
    tl.store(part + features, tl.sum(rows * shares[:, None], 0), mask=features < D)
