"""A product of few rows and a weight: as fast as the weight can be read.

    weight [outputs, inputs]    program 0   tile.rows outputs × all inputs, tile.cols a step
                                program 1   the next outputs
                                ...

With one to eight rows each value of the weight is used about once, so memory is the limit. A program asks for
many bytes of its outputs before it uses any, 16 a thread and load, and every row of the input takes part in
the same pass over the weight. The order of each sum is that of the tile alone: no atomics, no second pass,
and a row's result does not depend on the other rows.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"
# ruff: noqa: N803, N806 (compile-time constants are written in capitals)

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch.nn import functional

from hetero_gpu.overlap import meet, overlap_options

MOST_ROWS = 8
"""What the kernel takes."""

_FASTER_ROWS = 4
"""Above this so many rows share the weight that matrix units pay."""

_LOAD_BYTES = 16
_WARP, _WARPS = 32, 4
_PROGRAM_LOADS = 4
"""Of each thread, before it waits for the first."""


@dataclass(frozen=True)
class LinearTile:
    """What one program reads at once: `cols` inputs of `rows` outputs, by `num_warps` warps."""

    rows: int
    cols: int
    num_warps: int


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`x` `[rows, inputs]` by `weight` `[outputs, inputs]`, plus `bias` `[outputs]`: `[rows, outputs]`.

    On a GPU up to four rows by the kernel; more rows, and all on a CPU, by torch. Sums are float32, the
    result has the type of `x`. No host synchronisation. The weight may be read while the kernel that was
    launched just before still runs, so that one may not write it.
    """
    if not is_for_kernel(x, weight):
        return functional.linear(x, weight, bias)
    return linear_kernel(x, weight, bias)


def is_for_kernel(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether a product of few rows is faster by the kernel than by torch."""
    return x.device.type != "cpu" and 0 < x.shape[0] <= _FASTER_ROWS and weight.is_contiguous()


def linear_kernel(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, tile: LinearTile | None = None
) -> torch.Tensor:
    """See `linear`; by the kernel whatever the device, for up to `MOST_ROWS` rows and a contiguous weight."""
    rows, (outputs, inputs) = x.shape[0], weight.shape
    if x.shape != (rows, inputs) or not 0 < rows <= MOST_ROWS or not weight.is_contiguous():
        raise ValueError(f"{tuple(x.shape)} by {tuple(weight.shape)}: up to {MOST_ROWS} rows, same inputs")
    tile = tile or linear_tile(weight)
    out = x.new_empty((rows, outputs))
    _linear_rows[(triton.cdiv(outputs, tile.rows),)](
        x.contiguous(),
        weight,
        weight if bias is None else bias,
        out,
        HAS_BIAS=bias is not None,
        **launch_options(rows, weight, tile),
    )
    return out


def launch_options(rows: int, weight: torch.Tensor, tile: LinearTile) -> dict[str, Any]:
    """What a kernel of `products` is launched with: of `rows` and `weight`."""
    outputs, inputs = weight.shape
    return {
        "INPUTS": inputs,
        "OUTPUTS": outputs,
        "NUM_ROWS": rows,
        "ROW_SLOTS": triton.next_power_of_2(rows),
        "LANE": load_lane(weight),
        "TILE": tile,
        "num_warps": tile.num_warps,
        "enable_fp_fusion": weight.dtype != torch.float32,  # of halves products are exact either way
        **overlap_options(weight.device),
    }


def linear_reference(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """The same in float32, rounded once."""
    product = functional.linear(x.float(), weight.float(), None if bias is None else bias.float())
    return product.to(x.dtype)


def load_lane(weight: torch.Tensor) -> int:
    """Columns that a thread reads at once."""
    return _LOAD_BYTES // weight.element_size()


def linear_tile(weight: torch.Tensor) -> LinearTile:
    """A program's share: chosen by hand for the weight alone, so that rows cannot change a result."""
    inputs, lane = weight.shape[1], load_lane(weight)
    cols = min(max(triton.next_power_of_2(inputs) // 2, _WARP * lane), _WARPS * _WARP * lane * 2)
    return LinearTile(_PROGRAM_LOADS * _WARPS * _WARP * lane // cols, cols, _WARPS)


@triton.jit
def _linear_rows(
    x,
    weight,
    bias,
    out,
    HAS_BIAS: tl.constexpr,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    NUM_ROWS: tl.constexpr,
    ROW_SLOTS: tl.constexpr,
    LANE: tl.constexpr,
    TILE: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    outputs = tl.program_id(0) * TILE.rows + tl.arange(0, TILE.rows)
    store_products(
        x, weight, bias, out, outputs, HAS_BIAS, INPUTS, OUTPUTS, NUM_ROWS, ROW_SLOTS, LANE, TILE, OVERLAPS
    )


@triton.jit
def store_products(
    x,
    weight,
    bias,
    out,
    outputs,
    HAS_BIAS: tl.constexpr,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    NUM_ROWS: tl.constexpr,
    ROW_SLOTS: tl.constexpr,
    LANE: tl.constexpr,
    TILE: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Columns `outputs` of the product `out` `[NUM_ROWS, OUTPUTS]`: the share of one program."""
    slots = tl.arange(0, ROW_SLOTS)
    is_row, is_output = slots < NUM_ROWS, outputs < OUTPUTS
    sums = products(x, weight, outputs, INPUTS, OUTPUTS, NUM_ROWS, ROW_SLOTS, LANE, TILE, OVERLAPS)
    if HAS_BIAS:
        sums += tl.load(bias + outputs, mask=is_output, other=0.0).to(tl.float32)[None, :]
    tl.store(
        out + slots[:, None] * OUTPUTS + outputs[None, :],
        sums.to(out.dtype.element_ty),
        mask=is_row[:, None] & is_output[None, :],
    )


@triton.jit
def products(
    x,
    weight,
    outputs,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    NUM_ROWS: tl.constexpr,
    ROW_SLOTS: tl.constexpr,
    LANE: tl.constexpr,
    TILE: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Of each row and the weight's rows `outputs`, `[ROW_SLOTS, TILE.rows]` float32."""
    ROWS: tl.constexpr = TILE.rows
    LANES: tl.constexpr = TILE.cols // LANE
    slots = tl.arange(0, ROW_SLOTS)
    is_row, is_output = slots < NUM_ROWS, outputs < OUTPUTS
    acc = tl.zeros((ROW_SLOTS, ROWS, LANES), tl.float32)
    for start in tl.range(0, INPUTS, TILE.cols, num_stages=1):
        cols = start + tl.arange(0, TILE.cols)
        is_col = (cols < INPUTS)[None, None, :]
        values = tl.load(
            weight + outputs.to(tl.int64)[None, :, None] * INPUTS + cols[None, None, :],
            mask=is_output[None, :, None] & is_col,
            other=0.0,
        ).to(tl.float32)
        meet(OVERLAPS)  # the weight is older than the kernel before
        inputs = tl.load(
            x + slots[:, None, None] * INPUTS + cols[None, None, :],
            mask=is_row[:, None, None] & is_col,
            other=0.0,
        ).to(tl.float32)
        acc += tl.sum(tl.reshape(values * inputs, (ROW_SLOTS, ROWS, LANES, LANE)), axis=3)
    return tl.sum(acc, axis=2)
