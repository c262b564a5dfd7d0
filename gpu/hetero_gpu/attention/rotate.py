"""Between the projections and attention, in one launch: head norms, rotary embedding, cache write.

    projected [rows, (heads + 2 · kv_heads) · size]      one program a row and head

        q q q q q q q q | k k | v v
        norm, rotate    | norm, rotate, write | write     q goes to the output, k and v into the cache

Products are rounded to the type of the model before they are added, as separate torch operations do, so that
both ways give the same bits. Source of the rotation: Su et al., "RoFormer", 2021, §3.4.2, in halves.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"
# ruff: noqa: N803 (compile-time constants are written in capitals)

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hetero_gpu.attention.base import HeadNorms, Rotation
from hetero_gpu.overlap import meet, overlap_options


def rotate_append_kernel(
    projected: torch.Tensor,
    cache: tuple[torch.Tensor, torch.Tensor],
    positions: torch.Tensor,
    *,
    rotation: Rotation,
    norms: HeadNorms | None,
) -> torch.Tensor:
    """See `hetero_gpu.attention.rotate_append`."""
    keys, values = cache
    rows, kv_heads, max_length, size = keys.shape
    heads = projected.shape[1] // size - 2 * kv_heads
    if keys.shape != values.shape or projected.shape != (rows, (heads + 2 * kv_heads) * size) or heads < 1:
        raise ValueError(
            f"projections {tuple(projected.shape)} for keys {tuple(keys.shape)}, values {tuple(values.shape)}"
        )
    if projected.stride(1) != 1 or keys.stride(-1) != 1 or values.stride(-1) != 1:
        raise ValueError("the last axis of projections, keys and values must be contiguous")
    query = projected.new_empty((rows, heads, size))
    cos, sin = rotation.cos, rotation.sin
    _rotate_head[(rows, heads + kv_heads)](
        projected,
        query,
        keys,
        values,
        positions,
        cos,
        sin,
        cos if norms is None else norms.query_weight,
        cos if norms is None else norms.key_weight,
        0.0 if norms is None else norms.eps,
        max_length,
        projected.stride(0),
        cos.stride(0) if cos.shape[0] > 1 else 0,
        *keys.stride()[:3],
        *values.stride()[:3],
        HEADS=heads,
        KV_HEADS=kv_heads,
        SIZE=size,
        SLOTS=triton.next_power_of_2(size),
        ROTATED=rotation.size,
        TABLE=cos.shape[1],
        HAS_NORMS=norms is not None,
        ADDS_ONE=norms is not None and norms.adds_one,
        ROUNDS_FIRST=norms is not None and norms.rounds_first,
        num_warps=1,
        **overlap_options(projected.device),
    )
    return query


@triton.jit
def _normed(
    stored,
    at,
    is_inside,
    weight_pointer,
    scale,
    HAS_NORMS: tl.constexpr,
    ADDS_ONE: tl.constexpr,
    ROUNDS_FIRST: tl.constexpr,
):
    value = stored.to(tl.float32)
    if HAS_NORMS:
        weight = tl.load(weight_pointer + at, mask=is_inside, other=0.0).to(tl.float32)
        if ADDS_ONE:
            weight += 1.0
        value *= scale
        if ROUNDS_FIRST:
            value = value.to(stored.dtype).to(tl.float32)
        value = (value * weight).to(stored.dtype).to(tl.float32)
    return value


@triton.jit
def _rotate_head(
    projected_pointer,
    query_pointer,
    key_pointer,
    value_pointer,
    position_pointer,
    cos_pointer,
    sin_pointer,
    query_weight_pointer,
    key_weight_pointer,
    eps,
    max_length,
    projected_row,
    table_row,
    key_row,
    key_head,
    key_token,
    value_row,
    value_head,
    value_token,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    SLOTS: tl.constexpr,
    ROTATED: tl.constexpr,
    TABLE: tl.constexpr,
    HAS_NORMS: tl.constexpr,
    ADDS_ONE: tl.constexpr,
    ROUNDS_FIRST: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    meet(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    at = tl.arange(0, SLOTS)
    is_inside = at < SIZE
    is_rotated = at < ROTATED
    is_low = at < ROTATED // 2
    partner = tl.where(is_low, at + ROTATED // 2, at - ROTATED // 2)
    base = projected_pointer + row * projected_row + head * SIZE
    stored = tl.load(base + at, mask=is_inside, other=0.0)
    stored_partner = tl.load(base + partner, mask=is_rotated, other=0.0)
    full = stored.to(tl.float32)
    scale = tl.rsqrt(tl.sum(full * full, 0) / SIZE + eps)
    weight_pointer = query_weight_pointer
    if head >= HEADS:
        weight_pointer = key_weight_pointer
    own = _normed(stored, at, is_inside, weight_pointer, scale, HAS_NORMS, ADDS_ONE, ROUNDS_FIRST)
    other = _normed(
        stored_partner, partner, is_rotated, weight_pointer, scale, HAS_NORMS, ADDS_ONE, ROUNDS_FIRST
    )
    other = tl.where(is_low, -other, other)
    table_at = row * table_row + at % TABLE
    cos = tl.load(cos_pointer + table_at, mask=is_rotated, other=1.0).to(tl.float32)
    sin = tl.load(sin_pointer + table_at, mask=is_rotated, other=0.0).to(tl.float32)
    rotated = (own * cos).to(stored.dtype).to(tl.float32) + (other * sin).to(stored.dtype).to(tl.float32)
    if head < HEADS:
        tl.store(query_pointer + (row * HEADS + head) * SIZE + at, rotated, mask=is_inside)
    else:
        position = tl.load(position_pointer + row).to(tl.int64)
        is_written = is_inside & (position < max_length)
        kv_head = (head - HEADS).to(tl.int64)
        key_at = row * key_row + kv_head * key_head + position * key_token
        tl.store(key_pointer + key_at + at, rotated, mask=is_written)
        value = tl.load(base + KV_HEADS * SIZE + at, mask=is_inside, other=0.0)
        value_at = row * value_row + kv_head * value_head + position * value_token
        tl.store(value_pointer + value_at + at, value, mask=is_written)
