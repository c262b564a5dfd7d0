"""Eviction scores that follow the logical caches, in one launch."""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"
# ruff: noqa: N803 (compile-time constants are written in capitals)

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hetero_gpu.overlap import meet, overlap_options
from hetero_gpu.routing.caches import DeviceCaches


def follow(
    caches: DeviceCaches,
    layer: int,
    *,
    num_layers: int,
    active: torch.Tensor,
    score: torch.Tensor,
    held: float,
) -> None:
    """Write the rows of `score` (float64 `[L, E]`) of the `num_layers` layers from `layer` on: an expert's
    greatest priority in any active row, and `held` more if the cache of any active row holds it.

    `active` bool `[rows]`: of the first rows of `caches`. Priorities are 0 or more. Asynchronous, capturable.
    """
    _follow_kernel[(num_layers,)](
        active,
        score,
        caches.state.is_resident,
        caches.state.priority,
        layer,
        held,
        ROWS=len(active),
        LAYERS=caches.form.layers,
        EXPERTS=caches.form.experts,
        EXPERT_BLOCK=caches.form.expert_block,
        num_warps=1,
        **overlap_options(caches.device),
    )


@triton.jit(do_not_specialize=["layer"])
def _follow_kernel(
    active,
    score,
    is_resident,
    priority,
    layer,
    held,
    ROWS: tl.constexpr,
    LAYERS: tl.constexpr,
    EXPERTS: tl.constexpr,
    EXPERT_BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    meet(OVERLAPS)
    follow_layer(
        layer + tl.program_id(0), active, score, is_resident, priority, held,
        ROWS, LAYERS, EXPERTS, EXPERT_BLOCK,
    )  # fmt: skip


@triton.jit
def follow_layer(
    layer,
    active,
    score,
    is_resident,
    priority,
    held,
    ROWS: tl.constexpr,
    LAYERS: tl.constexpr,
    EXPERTS: tl.constexpr,
    EXPERT_BLOCK: tl.constexpr,
):
    """One layer of it, by one program."""
    experts = tl.arange(0, EXPERT_BLOCK)
    is_expert = experts < EXPERTS
    is_held, most = experts < 0, tl.zeros((EXPERT_BLOCK,), tl.float32)
    for row in tl.static_range(ROWS):
        at = (row * LAYERS + layer) * EXPERTS + experts
        counts = is_expert & (tl.load(active + row) != 0)
        is_held = is_held | (tl.load(is_resident + at, mask=counts, other=0) != 0)
        most = tl.maximum(most, tl.load(priority + at, mask=counts, other=0.0))
    total = tl.where(is_held, held, 0.0).to(tl.float64) + most.to(tl.float64)
    tl.store(score + layer * EXPERTS + experts, total, mask=is_expert)
