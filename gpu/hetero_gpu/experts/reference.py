"""What the kernels must give: plain torch, float32, one pair (token, k) after the other."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from hetero_gpu.experts.layout import Bias, ExpertFormat, Gate, Matrix, Scales

_DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "fp8": torch.float8_e4m3fn,
    "int8": torch.int8,
    "e8m0": torch.float8_e8m0fnu,
}
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_CODES = {"int4": torch.arange(-8, 8, dtype=torch.float32), "fp4": torch.tensor(_E2M1)}


def experts_reference(
    hidden: torch.Tensor,
    slabs: torch.Tensor,
    *,
    slots: torch.Tensor,
    weights: torch.Tensor,
    form: ExpertFormat,
) -> torch.Tensor:
    """Float32 `[T, H]`: each token's weighted sum of its experts.

    `hidden`: `[T, H]`. `slabs`: uint8 `[num_slabs, record_bytes]`. `slots`: integers `[T, K]`, negative where
    an expert is left out. `weights`: `[T, K]`. Any device.
    """
    out = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
    for token, slots_of_token in enumerate(slots.tolist()):
        for k, slot in enumerate(slots_of_token):
            if slot >= 0:
                out[token] += weights[token, k].float() * expert_reference(hidden[token], slabs[slot], form)
    return out


def expert_reference(x: torch.Tensor, record: torch.Tensor, form: ExpertFormat) -> torch.Tensor:
    """One expert: `[..., H]` to float32 `[..., H]`. `record`: uint8 `[record_bytes]`."""
    y = F.linear(x.float(), dequantize(record, form.up), _bias(record, form.up))
    h = apply_gate(y, form.gate)
    return F.linear(h, dequantize(record, form.down), _bias(record, form.down))


def apply_gate(y: torch.Tensor, gate: Gate) -> torch.Tensor:
    """`[..., 2I]` to `[..., I]`."""
    g, u = (y[..., ::2], y[..., 1::2]) if gate.is_interleaved else y.chunk(2, dim=-1)
    if gate.function != "silu":
        g, u = g.clamp(max=gate.limit), u.clamp(-gate.limit, gate.limit)
    if gate.function == "gpt_oss":
        return g * torch.sigmoid(g * gate.alpha) * (u + 1)
    return F.silu(g) * u


def dequantize(record: torch.Tensor, matrix: Matrix) -> torch.Tensor:
    """Float32 `[rows, cols]`."""
    data = record[matrix.offset : matrix.offset + matrix.num_bytes]
    if matrix.is_packed:
        codes = torch.stack((data & 0xF, data >> 4), dim=-1).flatten()
        values = _CODES[matrix.encoding].to(record.device)[codes.int()]
    else:
        values = data.view(_DTYPES[matrix.encoding]).float()
    if matrix.is_transposed:
        return values.view(matrix.cols, matrix.rows).T
    values = values.view(matrix.rows, matrix.cols)
    return values if matrix.scales is None else values * _factors(record, matrix, matrix.scales)


def _factors(record: torch.Tensor, matrix: Matrix, scales: Scales) -> torch.Tensor:
    """The scale of every element, float32 `[rows, cols]`."""
    parts, row_blocks, col_blocks = matrix.scale_shape
    flat = _floats(record, scales, parts * row_blocks * col_blocks)
    wide = flat.view(matrix.scale_shape).repeat_interleave(scales.block_rows, 1)[:, : matrix.rows // parts]
    return wide.repeat_interleave(scales.block_cols, 2)[..., : matrix.cols].reshape(matrix.rows, matrix.cols)


def _bias(record: torch.Tensor, matrix: Matrix) -> torch.Tensor | None:
    return None if matrix.bias is None else _floats(record, matrix.bias, matrix.rows)


def _floats(record: torch.Tensor, array: Scales | Bias, length: int) -> torch.Tensor:
    dtype = _DTYPES[array.encoding]
    return record[array.offset : array.offset + length * dtype.itemsize].view(dtype).float()
