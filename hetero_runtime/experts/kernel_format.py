"""A record described to the fused kernels: byte offsets, encodings and gate, from what the store knows.

What the kernels cannot read is no error: `expert_format` says why, and the caller computes with torch.
"""

from __future__ import annotations

from typing import Any

import torch

from hetero_gpu.experts.layout import PACKED, Bias, Encoding, ExpertFormat, Gate, Matrix, Scales
from hetero_gpu.experts.reference import apply_gate
from hetero_runtime.experts.formats import SCALE_SUFFIX, WeightForm
from hetero_runtime.experts.record import Field, RecordLayout

_FLOATS = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
_SCALES = {**_FLOATS, torch.float8_e8m0fnu: "e8m0", torch.uint8: "e8m0"}


class UnreadableError(ValueError):
    """Why the fused kernels cannot read a model's experts."""


def expert_format(layout: RecordLayout, forms: dict[str, WeightForm], module: Any) -> ExpertFormat:
    """The format of one expert. `module`: its transformers Experts module, for the gate and the orientation.

    Raises UnreadableError with the reason.
    """
    if not module.has_gate or getattr(module, "has_post_expert_norm", False):
        raise UnreadableError("experts without a gate, or with a norm of their own, have no fused kernel")
    fields = {field.name: field for field in layout.fields}
    try:
        return ExpertFormat(
            record_bytes=layout.record_bytes,
            up=_matrix(fields, forms, "gate_up_proj", is_transposed=module.is_transposed),
            down=_matrix(fields, forms, "down_proj", is_transposed=module.is_transposed),
            gate=_gate(module),
        )
    except ValueError as error:
        raise UnreadableError(str(error)) from error


def _matrix(
    fields: dict[str, Field], forms: dict[str, WeightForm], name: str, *, is_transposed: bool
) -> Matrix:
    field, form = fields[name], forms[name]
    bias = fields.get(f"{name}_bias")
    described = None if bias is None else Bias(bias.offset, _encoding(_FLOATS, bias))  # type: ignore[arg-type]
    if form.kind == "plain":
        rows, cols = reversed(field.shape) if is_transposed else field.shape
        encoding = _encoding(_FLOATS, field)
        return Matrix(field.offset, encoding, rows, cols, is_transposed, bias=described)  # type: ignore[arg-type]
    scale = fields[name + SCALE_SUFFIX]
    if form.kind == "mxfp4":  # on disk [rows, groups, 16 bytes], whatever the parameter's orientation
        rows, groups = field.shape[:2]
        scales = Scales(scale.offset, "e8m0", block_rows=1, block_cols=32)
        return Matrix(field.offset, "fp4", rows, groups * 32, scales=scales, bias=described)
    assert form.block is not None, f"{name}: {form.kind} without a block"
    encoding = _scaled_encoding(field, form)
    rows, cols = field.shape[0], field.shape[1] * (2 if encoding in PACKED else 1)
    scales = Scales(
        scale.offset,
        _encoding(_SCALES, scale),  # type: ignore[arg-type]
        block_rows=form.block[0],
        block_cols=form.block[1],
        parts=scale.shape[0],
    )
    return Matrix(field.offset, encoding, rows, cols, scales=scales, bias=described)


def _scaled_encoding(field: Field, form: WeightForm) -> Encoding:
    if form.kind in ("int8", "int4"):
        return form.kind
    if field.dtype == torch.int8:
        return "fp4"
    if field.dtype != torch.float8_e4m3fn:
        raise UnreadableError(f"{field.name} is {field.dtype}, which has no fused kernel")
    return "fp8"


def _encoding(known: dict[torch.dtype, str], field: Field) -> str:
    if field.dtype not in known:
        raise UnreadableError(f"{field.name} is {field.dtype}, which has no fused kernel")
    return known[field.dtype]


def _gate(module: Any) -> Gate:
    """The gate function, told by what it computes rather than by its name."""
    probe = torch.linspace(-12.0, 12.0, 64).repeat(4).view(4, 64) + torch.arange(4)[:, None] * 0.37
    expected = module._apply_gate(probe)
    limit, alpha = float(getattr(module, "limit", 0.0) or 0.0), float(getattr(module, "alpha", 1.0) or 1.0)
    candidates = [Gate()]
    if limit > 0:
        candidates += [
            Gate("clamped_silu", limit=limit),
            Gate("gpt_oss", is_interleaved=True, limit=limit, alpha=alpha),
        ]
    for gate in candidates:
        if torch.allclose(apply_gate(probe, gate), expected, rtol=1e-5, atol=1e-6):
            return gate
    raise UnreadableError(f"the gate function of {type(module).__name__} has no fused kernel")
