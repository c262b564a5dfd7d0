"""The check after loading: one expert, built by transformers' own operations, equals its record bit for bit.

Placements are worked out from element numbers of layer 0. This holds them, the reads and the formats to the
real bytes, at the price of one expert.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from hetero_runtime.checkpoint.lazy_tensor import TORCH_DTYPES
from hetero_runtime.checkpoint.safetensors_file import TensorEntry
from hetero_runtime.errors import CheckpointError
from hetero_runtime.experts.formats import WeightForm, materialize
from hetero_runtime.experts.sources import ExpertPlan, ParameterSource
from hetero_scheduler.keys import ExpertKey


def check_expert(plan: ExpertPlan, key: ExpertKey, fields: Mapping[str, torch.Tensor]) -> None:
    """Compare the fields of `key`'s record with the checkpoint. Raises CheckpointError when they differ."""
    module = plan.modules[key.layer]
    for source in module.parameters:
        form = plan.forms[source.name]
        if not _has_oracle(source, form):
            continue
        expected = _by_operations(source, key.expert, plan.num_experts)
        actual = materialize(fields, {source.name: form}, expected.dtype)[source.name]
        if not torch.allclose(actual, expected, rtol=0, atol=0, equal_nan=True):
            raise CheckpointError(
                f"{module.name}.{source.name}, expert {key.expert}: what was loaded differs from what "
                f"transformers makes of the same bytes; this checkpoint is not covered, please report it"
            )


def _has_oracle(source: ParameterSource, form: WeightForm) -> bool:
    """transformers takes blocks to divide a matrix evenly: it cannot judge a ragged one."""
    if form.block is None:
        return True
    return all(
        size % block == 0
        for weight in source.weights.values()
        for size, block in zip(weight.unpacked_shape, form.block, strict=True)
    )


def _by_operations(source: ParameterSource, expert: int, num_experts: int) -> torch.Tensor:
    weights = {name: read_tensor(tensor.of(expert, num_experts)) for name, tensor in source.weights.items()}
    scales = {name: read_tensor(tensor.of(expert, num_experts)) for name, tensor in source.scales.items()}
    return source.conversion.run(weights, scales)


def read_tensor(entry: TensorEntry) -> torch.Tensor:
    """One small tensor, read now."""
    with entry.file.open("rb") as file:
        file.seek(entry.offset)
        raw = bytearray(file.read(entry.num_bytes))
    return torch.frombuffer(raw, dtype=TORCH_DTYPES[entry.dtype]).view(entry.shape)
