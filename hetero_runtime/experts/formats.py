"""From the bytes of a record to the tensors that the computation uses.

    plain         the bytes are the weights: views, no copy
    int8          [rows, cols] whole numbers with one scale for each block
    int4          uint8 [rows, cols / 2] of two values + 8 each, low nibble first, scaled likewise
    block_scaled  float8 (or packed fp4 in int8) with one scale for each block of a matrix; a fused
                  parameter keeps its parts apart, [parts, ceil(rows / block), ceil(cols / block)] scales,
                  because a block that straddles gate and up does not exist on disk
    mxfp4         uint8 [rows, groups, 16] of two fp4 (e2m1) each, and one power of two for each group of 32

These are the references: plain torch, float32 inside, bit-equal to what transformers loads when it
dequantises (but for a scale of 255, which is NaN by OCP). Formats: transformers
`integrations/finegrained_fp8.py` and `integrations/mxfp4.py`; OCP Microscaling Formats 1.0 for e2m1 and
e8m0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

SCALE_SUFFIX = ".scale"
"""The field `gate_up_proj.scale` holds the scales of the field `gate_up_proj`."""

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


@dataclass(frozen=True)
class WeightForm:
    """How one field holds its weights. `block` is (rows, columns) of a block, where there are scales."""

    kind: Literal["plain", "block_scaled", "mxfp4", "int8", "int4"]
    block: tuple[int, int] | None = None
    is_transposed: bool = False
    """The field holds [outputs, inputs], and the parameter is its transpose (mxfp4 says so by itself)."""

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> WeightForm:
        """The form whose `dataclasses.asdict` went through JSON. Raises TypeError for an unknown field."""
        block = values.get("block")
        return cls(**{**values, "block": None if block is None else tuple(block)})


PLAIN = WeightForm("plain")
MXFP4 = WeightForm("mxfp4")


def materialize(
    fields: Mapping[str, torch.Tensor], forms: Mapping[str, WeightForm], dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """The parameters of one expert as its transformers module has them, in `dtype`.

    `fields`: `RecordLayout.view` of a record, on any device. `forms`: form by parameter name. A plain
    field that already has `dtype` comes back as a view of the record.
    """
    return {name: _parameter(fields, name, form, dtype) for name, form in forms.items()}


def _parameter(
    fields: Mapping[str, torch.Tensor], name: str, form: WeightForm, dtype: torch.dtype
) -> torch.Tensor:
    if form.kind == "plain":
        return fields[name].to(dtype)
    scales = fields[name + SCALE_SUFFIX]
    if form.kind == "mxfp4":
        return dequantize_mxfp4(fields[name], scales, dtype=dtype)
    assert form.block is not None, f"{name}: {form.kind} without a block"
    values = _values(fields[name], form.kind)
    matrix = _scale_blocks(values, scales, block=form.block, dtype=dtype)
    return matrix.T.contiguous() if form.is_transposed else matrix


def _values(field: torch.Tensor, kind: str) -> torch.Tensor:
    """What a field holds before scaling, float32 `[rows, cols]`."""
    if kind == "int4":
        return torch.stack((field & 0xF, field >> 4), dim=-1).flatten(-2).float() - 8
    return (
        _unpack_fp4(field.view(torch.uint8))
        if kind != "int8" and field.dtype == torch.int8
        else field.float()
    )


def dequantize_blocks(
    weight: torch.Tensor, scales: torch.Tensor, *, block: tuple[int, int], dtype: torch.dtype
) -> torch.Tensor:
    """Block-scaled weights to `dtype`.

    `weight`: float8 `[parts * rows, cols]`, or int8 `[parts * rows, cols / 2]` of two fp4 a byte, low
    nibble first. `scales`: `[parts, ceil(rows / block[0]), ceil(cols / block[1])]`, float32, float16,
    bfloat16, or powers of two (float8_e8m0fnu, or uint8 with the same bits). The last block of a row or
    column may be short. Returns `[parts * rows, cols]`.
    """
    return _scale_blocks(_values(weight, "block_scaled"), scales, block=block, dtype=dtype)


def _scale_blocks(
    values: torch.Tensor, scales: torch.Tensor, *, block: tuple[int, int], dtype: torch.dtype
) -> torch.Tensor:
    """Float32 `[parts * rows, cols]` times the scale of each one's block, in `dtype`."""
    parts, _, num_col_blocks = scales.shape
    rows, cols = values.shape[0] // parts, values.shape[1]
    factors = _powers_of_two(scales) if scales.dtype == torch.uint8 else scales.float()
    factors = factors.repeat_interleave(block[0], dim=1)[:, :rows]  # [parts, rows, col_blocks]
    if cols == num_col_blocks * block[1]:
        blocked = values.view(parts, rows, num_col_blocks, block[1])
        return (blocked * factors[..., None]).to(dtype).view(parts * rows, cols)
    factors = factors.repeat_interleave(block[1], dim=2)[..., :cols]
    return (values.view(parts, rows, cols) * factors).to(dtype).view(parts * rows, cols)


def dequantize_mxfp4(blocks: torch.Tensor, scales: torch.Tensor, *, dtype: torch.dtype) -> torch.Tensor:
    """MXFP4 weights to `dtype`, transposed as GptOss uses them.

    `blocks`: uint8 `[out, groups, 16]`, low nibble first. `scales`: uint8 `[out, groups]`. Returns
    `[groups * 32, out]`, contiguous.
    """
    values = _unpack_fp4(blocks) * _powers_of_two(scales)[..., None]  # [out, groups, 32]
    return values.to(dtype).flatten(1).T.contiguous()


def _unpack_fp4(packed: torch.Tensor) -> torch.Tensor:
    """uint8 `[..., n]` to float32 `[..., 2n]`."""
    table = torch.tensor(_E2M1, dtype=torch.float32, device=packed.device)
    nibbles = torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)
    return table[nibbles.int()]


def _powers_of_two(exponents: torch.Tensor) -> torch.Tensor:
    """uint8 e8m0 to float32, exactly; 255 is NaN."""
    return exponents.view(torch.float8_e8m0fnu).float()
