"""RMS norm, alone or of a sum, in one launch. transformers' modules take about six, more than its bytes need.

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

from hetero_gpu.overlap import meet, overlap_options


class NormForm(NamedTuple):
    """`adds_one`: the weight counts from one (Qwen3-Next, Gemma). `rounds_first`: the normalised value is
    rounded to the type of the input before it is weighted (Llama), not after (gpt-oss)."""

    adds_one: bool = False
    rounds_first: bool = True


class Summed(NamedTuple):
    """A sum and the norm of it, both of the shape of what was added."""

    hidden: torch.Tensor
    normed: torch.Tensor


def rms_norm(hidden: torch.Tensor, weight: torch.Tensor, *, eps: float, form: NormForm) -> torch.Tensor:
    """`hidden` `[..., size]` over its root mean square, times `weight` `[size]`; same shape and type."""
    rows = _rows(hidden, weight)
    output = torch.empty_like(rows)
    _launch((rows, rows, output, output), weight, eps, form, adds=False)
    return output.view(hidden.shape)


def add_rms_norm(
    hidden: torch.Tensor, other: torch.Tensor, weight: torch.Tensor, *, eps: float, form: NormForm
) -> Summed:
    """The norm of `hidden + other` (rounded to their type), and that sum, in one launch."""
    if hidden.shape != other.shape or hidden.dtype != other.dtype:
        raise ValueError(f"{tuple(hidden.shape)} {hidden.dtype} and {tuple(other.shape)} {other.dtype}")
    rows, others = _rows(hidden, weight), _rows(other, weight)
    total, output = torch.empty_like(rows), torch.empty_like(rows)
    _launch((rows, others, total, output), weight, eps, form, adds=True)
    return Summed(total.view(hidden.shape), output.view(hidden.shape))


def _rows(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    size = hidden.shape[-1]
    if weight.shape != (size,):
        raise ValueError(f"a weight of {tuple(weight.shape)} for vectors of {size}")
    return hidden.reshape(-1, size).contiguous()


def _launch(
    tensors: tuple[torch.Tensor, ...], weight: torch.Tensor, eps: float, form: NormForm, *, adds: bool
) -> None:
    """`tensors`: vectors, what is added to them, where the sum goes, where its norm goes; `[rows, size]`."""
    num_rows, size = tensors[0].shape
    slots = triton.next_power_of_2(size)
    _norm_rows[(num_rows,)](
        *tensors,
        weight,
        eps,
        ADDS=adds,
        ADDS_ONE=form.adds_one,
        ROUNDS_FIRST=form.rounds_first,
        SIZE=size,
        SLOTS=slots,
        num_warps=min(8, max(1, slots // 256)),
        **overlap_options(weight.device),
    )


def rms_norm_reference(
    hidden: torch.Tensor, weight: torch.Tensor, *, eps: float, form: NormForm
) -> torch.Tensor:
    """The same in torch."""
    full = hidden.float()
    normed = full * torch.rsqrt(full.pow(2).mean(-1, keepdim=True) + eps)
    if form.rounds_first:
        normed = normed.to(hidden.dtype).float()
    return (normed * (weight.float() + form.adds_one)).to(hidden.dtype)


def add_rms_norm_reference(
    hidden: torch.Tensor, other: torch.Tensor, weight: torch.Tensor, *, eps: float, form: NormForm
) -> Summed:
    """The same in torch."""
    total = hidden + other
    return Summed(total, rms_norm_reference(total, weight, eps=eps, form=form))


@triton.jit
def _norm_rows(
    hidden_pointer,
    other_pointer,
    total_pointer,
    output_pointer,
    weight_pointer,
    eps,
    ADDS: tl.constexpr,
    ADDS_ONE: tl.constexpr,
    ROUNDS_FIRST: tl.constexpr,
    SIZE: tl.constexpr,
    SLOTS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    meet(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, SLOTS)
    is_inside = at < SIZE
    stored = tl.load(hidden_pointer + row * SIZE + at, mask=is_inside, other=0.0)
    weight = tl.load(weight_pointer + at, mask=is_inside, other=0.0).to(tl.float32)
    hidden = stored.to(tl.float32)
    if ADDS:
        other = tl.load(other_pointer + row * SIZE + at, mask=is_inside, other=0.0).to(tl.float32)
        total = (hidden + other).to(stored.dtype)
        tl.store(total_pointer + row * SIZE + at, total, mask=is_inside)
        hidden = total.to(tl.float32)
    normed = hidden * tl.rsqrt(tl.sum(hidden * hidden, 0) / SIZE + eps)
    if ROUNDS_FIRST:
        normed = normed.to(stored.dtype).to(tl.float32)
    if ADDS_ONE:
        weight += 1.0
    tl.store(output_pointer + row * SIZE + at, normed * weight, mask=is_inside)
