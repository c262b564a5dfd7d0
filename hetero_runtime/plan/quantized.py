"""The geometry of a model whose experts are loaded in another format, from its headers alone."""

from __future__ import annotations

import math
from dataclasses import replace

from hetero_runtime.checkpoint.safetensors_file import DTYPE_BYTES
from hetero_runtime.config.tree import ExpertsFormat
from hetero_runtime.experts.encodings import ENCODINGS
from hetero_runtime.experts.record import record_size
from hetero_runtime.plan.geometry import Geometry
from hetero_runtime.plan.routed import ExpertField

_UP, _DOWN = ("gate_up_proj", "gate_up_proj.weight"), ("down_proj", "down_proj.weight")


def quantized(geometry: Geometry, experts: ExpertsFormat) -> Geometry:
    """`geometry` with records as `model.experts` asks for them.

    Raises ConfigError, with the fix, where the experts of the checkpoint cannot be written so.
    """
    if experts == "checkpoint":
        return geometry
    encoding, sizes, is_bf16 = ENCODINGS[experts], [], experts == "bf16"
    for field in geometry.expert_fields:
        if field.name in _UP + _DOWN or _is_scaled(field):
            rows, cols = _shape(field, geometry.hidden_size)
            encoding.check(field.name.removesuffix(".weight"), field.dtype, cols)
            sizes += encoding.field_bytes(rows, cols)
        else:
            sizes.append(field.num_bytes)
            is_bf16 = is_bf16 and field.dtype == "BF16"
    return replace(
        geometry,
        record_bytes=record_size(sizes),
        source_record_bytes=geometry.record_bytes,
        expert_dtype=experts,
        has_bf16_experts=is_bf16,
    )


def _is_scaled(field: ExpertField) -> bool:
    """Whether these are values that have scales in a field of their own."""
    return field.name.endswith("_blocks")


def _shape(field: ExpertField, hidden: int) -> tuple[int, int]:
    """Outputs and inputs of a matrix: one of them is the model's width."""
    other = math.ceil(field.num_bytes / DTYPE_BYTES[field.dtype] / hidden)
    return (hidden, other) if field.name in _DOWN else (other, hidden)
