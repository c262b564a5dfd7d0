"""Latent attention behind attention: what a head attended to, expanded to its value, in one launch.

    latent [rows, heads, rank]  ·  weight [heads, value, rank]  ─►  [rows, heads · value]

One program a row, head and block of the value. The weight is read while attention still runs.
Source: DeepSeek-AI, "DeepSeek-V2", arXiv 2405.04434, §2.1.2.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"
# ruff: noqa: N803 (compile-time constants are written in capitals)

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hetero_gpu.overlap import meet, overlap_options

_BLOCK = 16
"""Elements of the value a program: with 16 heads of 128, as many programs as processors."""


def expand_latent_kernel(latent: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """See `hetero_gpu.attention.expand_latent`."""
    (rows, heads, rank), value_size = latent.shape, weight.shape[1]
    if weight.shape != (heads, value_size, rank):
        raise ValueError(f"latents {tuple(latent.shape)} for a weight of {tuple(weight.shape)}")
    if latent.stride(-1) != 1 or weight.stride(-1) != 1:
        raise ValueError("the last axis of latents and weight must be contiguous")
    output = latent.new_empty((rows, heads * value_size))
    _expand_head[(rows, heads, triton.cdiv(value_size, _BLOCK))](
        latent,
        weight,
        output,
        *latent.stride()[:2],
        *weight.stride()[:2],
        VALUE_SIZE=value_size,
        RANK=rank,
        RANK_SLOTS=triton.next_power_of_2(rank),
        BLOCK=_BLOCK,
        num_warps=4,
        **overlap_options(latent.device),
    )
    return output


@triton.jit
def _expand_head(
    latent_pointer,
    weight_pointer,
    output_pointer,
    latent_row,
    latent_head,
    weight_head,
    weight_value,
    VALUE_SIZE: tl.constexpr,
    RANK: tl.constexpr,
    RANK_SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    value, rank = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, RANK_SLOTS)
    is_value, is_rank = value < VALUE_SIZE, rank < RANK
    weights = tl.load(
        weight_pointer + head * weight_head + value[:, None] * weight_value + rank[None, :],
        mask=is_value[:, None] & is_rank[None, :],
        other=0.0,
    ).to(tl.float32)
    meet(OVERLAPS)  # the weight is older than the kernel before
    latent = tl.load(latent_pointer + row * latent_row + head * latent_head + rank, mask=is_rank, other=0.0)
    products = tl.sum(weights * latent.to(tl.float32)[None, :], 1)
    output_at = output_pointer + (row * tl.num_programs(1) + head) * VALUE_SIZE
    tl.store(output_at + value, products, mask=is_value)
