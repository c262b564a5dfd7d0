"""RMS norm in one launch. transformers' modules take about six, more time than the bytes in a decode step.

Modules of transformers agree on the formula and differ in two details, which `NormForm` names.
Source: Zhang and Sennrich, "Root mean square layer normalization", 2019.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"
# ruff: noqa: N803 (compile-time constants are written in capitals)

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl


class NormForm(NamedTuple):
    """`adds_one`: the weight counts from one (Qwen3-Next, Gemma). `rounds_first`: the normalised value is
    rounded to the type of the input before it is weighted (Llama), not after (gpt-oss)."""

    adds_one: bool = False
    rounds_first: bool = True


def rms_norm(hidden: torch.Tensor, weight: torch.Tensor, *, eps: float, form: NormForm) -> torch.Tensor:
    """`hidden` `[..., size]` over its root mean square, times `weight` `[size]`; same shape and type."""
    size = hidden.shape[-1]
    if weight.shape != (size,):
        raise ValueError(f"a weight of {tuple(weight.shape)} for vectors of {size}")
    rows = hidden.reshape(-1, size).contiguous()
    output = torch.empty_like(rows)
    slots = triton.next_power_of_2(size)
    _norm_rows[(rows.shape[0],)](
        rows,
        weight,
        output,
        eps,
        ADDS_ONE=form.adds_one,
        ROUNDS_FIRST=form.rounds_first,
        SIZE=size,
        SLOTS=slots,
        num_warps=min(8, max(1, slots // 256)),
    )
    return output.view(hidden.shape)


def rms_norm_reference(
    hidden: torch.Tensor, weight: torch.Tensor, *, eps: float, form: NormForm
) -> torch.Tensor:
    """The same in torch."""
    full = hidden.float()
    normed = full * torch.rsqrt(full.pow(2).mean(-1, keepdim=True) + eps)
    if form.rounds_first:
        normed = normed.to(hidden.dtype).float()
    return (normed * (weight.float() + form.adds_one)).to(hidden.dtype)


@triton.jit
def _norm_rows(
    hidden_pointer,
    weight_pointer,
    output_pointer,
    eps,
    ADDS_ONE: tl.constexpr,
    ROUNDS_FIRST: tl.constexpr,
    SIZE: tl.constexpr,
    SLOTS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, SLOTS)
    is_inside = at < SIZE
    stored = tl.load(hidden_pointer + row * SIZE + at, mask=is_inside, other=0.0)
    weight = tl.load(weight_pointer + at, mask=is_inside, other=0.0).to(tl.float32)
    hidden = stored.to(tl.float32)
    normed = hidden * tl.rsqrt(tl.sum(hidden * hidden, 0) / SIZE + eps)
    if ROUNDS_FIRST:
        normed = normed.to(stored.dtype).to(tl.float32)
    if ADDS_ONE:
        weight += 1.0
    tl.store(output_pointer + row * SIZE + at, normed * weight, mask=is_inside)
