"""Latent attention between the projections and attention, in one launch: expansion of keys moved to the
query, norm of the latent, rotary embedding, cache write.

    query  [rows, heads · (nope + rotary)]      latent [rows, rank + rotary]
             │ · weight [nope, rank]  │ rotate           │ norm     │ rotate
             ▼                        ▼                  ▼          ▼
    output [rows, heads, rank ‖ rotary]         cache  latent       rotary

One program a row, head and block of the rank, one more a head for what is rotated, and the same for the one
head of keys. The weight is read before the query is there. Products of the rotation are rounded to the type
of its tables before they are added, as separate torch operations do.
Source: DeepSeek-AI, "DeepSeek-V2", arXiv 2405.04434, §2.1.2 and §2.1.3.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"
# ruff: noqa: N803 (compile-time constants are written in capitals)

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hetero_gpu.attention.base import LatentNorm, PairRotation
from hetero_gpu.overlap import meet, overlap_options

_BLOCK = 64
"""Elements of the rank a program: with 16 heads and a rank of 512, as many programs as processors."""


def fold_append_kernel(
    new: tuple[torch.Tensor, torch.Tensor],
    cache: tuple[torch.Tensor, torch.Tensor],
    positions: torch.Tensor,
    *,
    weight: torch.Tensor,
    rotation: PairRotation,
    norm: LatentNorm,
) -> torch.Tensor:
    """See `hetero_gpu.attention.fold_append`."""
    _check(new, cache, weight)
    (query, latent), (latents, rotaries) = new, cache
    (heads, nope, rank), rope, rows = weight.shape, rotaries.shape[-1], query.shape[0]
    folded = query.new_empty((rows, heads, rank + rope))
    cos, sin = rotation.cos, rotation.sin
    blocks = triton.cdiv(rank, _BLOCK)
    _fold_append[(rows, heads + 1, blocks + 1)](
        query,
        latent,
        folded,
        weight,
        latents,
        rotaries,
        positions,
        cos,
        sin,
        norm.weight,
        norm.eps,
        latents.shape[2],
        query.stride(0),
        latent.stride(0),
        *weight.stride()[:2],
        latents.stride(0),
        latents.stride(2),
        rotaries.stride(0),
        rotaries.stride(2),
        cos.stride(0) if cos.shape[0] > 1 else 0,
        cos.stride(1),
        HEADS=heads,
        NOPE=nope,
        ROPE=rope,
        RANK=rank,
        NOPE_SLOTS=triton.next_power_of_2(nope),
        ROPE_SLOTS=triton.next_power_of_2(rope),
        RANK_SLOTS=triton.next_power_of_2(rank),
        BLOCK=_BLOCK,
        READS_PAIRS=rotation.reads_pairs,
        WRITES_PAIRS=rotation.writes_pairs,
        ADDS_ONE=norm.adds_one,
        ROUNDS_FIRST=norm.rounds_first,
        num_warps=4,
        **overlap_options(query.device),
    )
    return folded


def _check(
    new: tuple[torch.Tensor, torch.Tensor], cache: tuple[torch.Tensor, torch.Tensor], weight: torch.Tensor
) -> None:
    (query, latent), (latents, rotaries) = new, cache
    (heads, nope, rank), rope = weight.shape, rotaries.shape[-1]
    rows = query.shape[0]
    shapes = [tuple(tensor.shape) for tensor in (query, latent, latents, rotaries)]
    length = latents.shape[2]
    wanted = [
        (rows, heads * (nope + rope)),
        (rows, rank + rope),
        (rows, 1, length, rank),
        (rows, 1, length, rope),
    ]
    if shapes != wanted or rope % 2:
        raise ValueError(
            f"query, latent and cache {shapes} for a weight of {tuple(weight.shape)}: not {wanted}"
        )
    if any(tensor.stride(-1) != 1 for tensor in (*new, *cache, weight)):
        raise ValueError("the last axis of query, latent, cache and weight must be contiguous")


@triton.jit
def _fold(
    query_at,
    weight_at,
    output_at,
    weight_nope,
    block,
    NOPE: tl.constexpr,
    RANK: tl.constexpr,
    NOPE_SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """One block of a head's latent query."""
    nope, rank = tl.arange(0, NOPE_SLOTS), block * BLOCK + tl.arange(0, BLOCK)
    is_nope, is_rank = nope < NOPE, rank < RANK
    weights = tl.load(
        weight_at + nope[:, None] * weight_nope + rank[None, :],
        mask=is_nope[:, None] & is_rank[None, :],
        other=0.0,
    ).to(tl.float32)
    meet(OVERLAPS)  # the weight is older than the kernel before
    query = tl.load(query_at + nope, mask=is_nope, other=0.0).to(tl.float32)
    tl.store(output_at + rank, tl.sum(weights * query[:, None], 0), mask=is_rank)


@triton.jit
def _normed_block(
    latent_at,
    weight_pointer,
    output_at,
    eps,
    block,
    is_kept,
    RANK: tl.constexpr,
    RANK_SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
    ADDS_ONE: tl.constexpr,
    ROUNDS_FIRST: tl.constexpr,
):
    """One block of a normed latent vector."""
    every = tl.arange(0, RANK_SLOTS)
    full = tl.load(latent_at + every, mask=every < RANK, other=0.0).to(tl.float32)
    rank = block * BLOCK + tl.arange(0, BLOCK)
    is_rank = rank < RANK
    stored = tl.load(latent_at + rank, mask=is_rank, other=0.0)
    weight = tl.load(weight_pointer + rank, mask=is_rank, other=0.0).to(tl.float32)
    value = stored.to(tl.float32) * tl.rsqrt(tl.sum(full * full, 0) / RANK + eps)
    if ROUNDS_FIRST:
        value = value.to(stored.dtype).to(tl.float32)
    if ADDS_ONE:
        weight += 1.0
    tl.store(output_at + rank, value * weight, mask=is_rank & is_kept)


@triton.jit
def _turned(
    input_at,
    output_at,
    cos_at,
    sin_at,
    table_pair,
    is_kept,
    ROPE: tl.constexpr,
    ROPE_SLOTS: tl.constexpr,
    READS_PAIRS: tl.constexpr,
    WRITES_PAIRS: tl.constexpr,
):
    """A vector rotated."""
    at = tl.arange(0, ROPE_SLOTS)
    is_inside = at < ROPE
    if WRITES_PAIRS:
        pair, is_first = at // 2, at % 2 == 0
    else:
        pair, is_first = at % (ROPE // 2), at < ROPE // 2
    if READS_PAIRS:
        first, second = 2 * pair, 2 * pair + 1
    else:
        first, second = pair, pair + ROPE // 2
    own_input = tl.load(input_at + tl.where(is_first, first, second), mask=is_inside, other=0.0)
    other = tl.load(input_at + tl.where(is_first, second, first), mask=is_inside, other=0.0).to(tl.float32)
    cos = tl.load(cos_at + pair * table_pair, mask=is_inside, other=0.0)
    sin = tl.load(sin_at + pair * table_pair, mask=is_inside, other=0.0)
    own = (own_input.to(tl.float32) * cos.to(tl.float32)).to(cos.dtype).to(tl.float32)
    other = (tl.where(is_first, -other, other) * sin.to(tl.float32)).to(sin.dtype).to(tl.float32)
    tl.store(output_at + at, own + other, mask=is_inside & is_kept)


@triton.jit
def _fold_append(
    query_pointer,
    latent_pointer,
    folded_pointer,
    weight_pointer,
    latents_pointer,
    rotaries_pointer,
    position_pointer,
    cos_pointer,
    sin_pointer,
    norm_pointer,
    eps,
    max_length,
    query_row,
    latent_row,
    weight_head,
    weight_nope,
    latents_row,
    latents_token,
    rotaries_row,
    rotaries_token,
    table_row,
    table_pair,
    HEADS: tl.constexpr,
    NOPE: tl.constexpr,
    ROPE: tl.constexpr,
    RANK: tl.constexpr,
    NOPE_SLOTS: tl.constexpr,
    ROPE_SLOTS: tl.constexpr,
    RANK_SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
    READS_PAIRS: tl.constexpr,
    WRITES_PAIRS: tl.constexpr,
    ADDS_ONE: tl.constexpr,
    ROUNDS_FIRST: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head, block = tl.program_id(1).to(tl.int64), tl.program_id(2)
    last = tl.num_programs(2) - 1
    query_at = query_pointer + row * query_row + head * (NOPE + ROPE)
    folded_at = folded_pointer + (row * HEADS + head) * (RANK + ROPE)
    latent_at = latent_pointer + row * latent_row
    if (head < HEADS) & (block < last):
        weight_at = weight_pointer + head * weight_head
        _fold(query_at, weight_at, folded_at, weight_nope, block, NOPE, RANK, NOPE_SLOTS, BLOCK, OVERLAPS)
        return
    meet(OVERLAPS)
    position = tl.load(position_pointer + row).to(tl.int64)
    is_kept = (head < HEADS) | (position < max_length)
    # fmt: off
    if block == last:
        input_at, output_at = query_at + NOPE, folded_at + RANK
        if head == HEADS:
            input_at = latent_at + RANK
            output_at = rotaries_pointer + row * rotaries_row + position * rotaries_token
        _turned(
            input_at, output_at, cos_pointer + row * table_row, sin_pointer + row * table_row, table_pair,
            is_kept, ROPE, ROPE_SLOTS, READS_PAIRS, WRITES_PAIRS)
    else:
        output_at = latents_pointer + row * latents_row + position * latents_token
        _normed_block(
            latent_at, norm_pointer, output_at, eps, block, is_kept,
            RANK, RANK_SLOTS, BLOCK, ADDS_ONE, ROUNDS_FIRST)
    # fmt: on
