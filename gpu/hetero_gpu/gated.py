"""The first half of a gated MLP in one launch: two products, the activation of one, times the other.

    out = silu(x · gate) * (x · up)      gate, up [outputs, inputs], where they are

A program computes the same outputs of both products, each as `linear` does. Each step is rounded to the type
of the input, as separate torch operations do. Source: Shazeer, "GLU variants improve transformer", 2020.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"
# ruff: noqa: N803 (compile-time constants are written in capitals)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.nn import functional

from hetero_gpu.linear import MOST_ROWS, is_for_kernel, launch_options, linear_tile, products


def gated_linear(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """`x` `[rows, inputs]` to `[rows, outputs]`, of its type; when by the kernel, and what may not be written
    then, as `linear` says."""
    if is_for_kernel(x, gate) and up.is_contiguous():
        return gated_linear_kernel(x, gate, up)
    return functional.silu(functional.linear(x, gate)) * functional.linear(x, up)


def gated_linear_kernel(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """See `gated_linear`; by the kernel whatever the device, for up to `MOST_ROWS` rows."""
    rows, (outputs, inputs) = x.shape[0], gate.shape
    if x.shape != (rows, inputs) or gate.shape != up.shape or not 0 < rows <= MOST_ROWS:
        shapes = [tuple(tensor.shape) for tensor in (x, gate, up)]
        raise ValueError(f"rows, gate and up of {shapes}: up to {MOST_ROWS} rows, same inputs")
    if not gate.is_contiguous() or not up.is_contiguous():
        raise ValueError("gate and up must be contiguous")
    tile, out = linear_tile(gate), x.new_empty((rows, outputs))
    _gated_linear_rows[(triton.cdiv(outputs, tile.rows),)](
        x.contiguous(),
        gate,
        up,
        out,
        **launch_options(rows, gate, tile),
    )
    return out


@triton.jit
def _gated_linear_rows(
    x,
    gate,
    up,
    out,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    NUM_ROWS: tl.constexpr,
    ROW_SLOTS: tl.constexpr,
    LANE: tl.constexpr,
    TILE: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    outputs = tl.program_id(0) * TILE.rows + tl.arange(0, TILE.rows)
    gated = products(x, gate, outputs, INPUTS, OUTPUTS, NUM_ROWS, ROW_SLOTS, LANE, TILE, OVERLAPS)
    upper = products(x, up, outputs, INPUTS, OUTPUTS, NUM_ROWS, ROW_SLOTS, LANE, TILE, OVERLAPS)
    gated, upper = gated.to(out.dtype.element_ty).to(tl.float32), upper.to(out.dtype.element_ty)
    active = (gated * tl.sigmoid(gated)).to(out.dtype.element_ty).to(tl.float32)
    slots = tl.arange(0, ROW_SLOTS)
    tl.store(
        out + slots[:, None] * OUTPUTS + outputs[None, :],
        active * upper.to(tl.float32),
        mask=(slots < NUM_ROWS)[:, None] & (outputs < OUTPUTS)[None, :],
    )
