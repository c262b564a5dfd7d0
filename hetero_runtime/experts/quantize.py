"""Records of a checkpoint in another format: which fields they have, and how they are filled.

    plain record   |gate_up_proj (float)|down_proj (float)|biases|
    new record     |gate_up_proj|.scale|down_proj|.scale|biases|       matrices as [outputs, inputs]

The layout of a plain checkpoint decides; one that is quantised already is refused. Compiled quantisers are
imported when the first record is made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hetero_runtime.checkpoint.lazy_tensor import DTYPE_NAMES, TORCH_DTYPES
from hetero_runtime.config.tree import ExpertsFormat
from hetero_runtime.errors import CheckpointError
from hetero_runtime.experts.encodings import ENCODINGS, Encoding
from hetero_runtime.experts.formats import PLAIN, SCALE_SUFFIX, WeightForm
from hetero_runtime.experts.record import Field, RecordLayout
from hetero_runtime.experts.sources import ExpertPlan
from hetero_runtime.experts.table import RecordTable
from hetero_scheduler.keys import ExpertKey

Bytes = npt.NDArray[np.uint8]
Squares = npt.NDArray[np.float64]


class Quantizer:
    """Writes records of `table` from the plain records of a checkpoint. Any number of threads may use it."""

    def __init__(self, plan: ExpertPlan, encoding: Encoding) -> None:
        """Raises ConfigError, with the fix, where the experts cannot be written so."""
        self._encoding, self._plain = encoding, plan.layout
        self._is_transposed = plan.modules[0].is_transposed
        tensors: list[tuple[str, torch.dtype, tuple[int, ...]]] = []
        forms: dict[str, WeightForm] = {}
        for field in plan.layout.fields:
            forms[field.name], described = self._describe(field)
            tensors += described
        layout = RecordLayout.of(tensors)
        self.table = RecordTable(len(plan.modules), plan.num_experts, layout, forms)

    def write(self, key: ExpertKey, plain: torch.Tensor, into: Bytes) -> Squares:
        """Write the record of `key` to `into`, uint8 `[record_bytes]`, from its plain one.

        Returns the sums of squared errors and squared weights of its matrices, float64 `[2]`. Raises
        CheckpointError for a weight that is infinite or NaN.
        """
        sources = self._plain.view(plain)
        fields = self.table.layout.view(torch.from_numpy(into))
        squares = np.zeros(2)
        for name, source in sources.items():
            if is_matrix(source.shape):
                try:
                    squares += self._write_matrix(name, source, fields)
                except ValueError as error:
                    raise CheckpointError(
                        f"expert {key.expert} of MoE layer {key.layer}, {name}: {error}; the checkpoint is "
                        f"damaged, or write model.experts: checkpoint"
                    ) from error
            else:
                fields[name].copy_(source)
        return squares

    def _describe(self, field: Field) -> tuple[WeightForm, list[tuple[str, torch.dtype, tuple[int, ...]]]]:
        encoding = self._encoding
        if not is_matrix(field.shape):
            return PLAIN, [(field.name, field.dtype, field.shape)]
        value_dtype = TORCH_DTYPES[encoding.value_dtype]
        rows, cols = reversed(field.shape) if self._is_transposed else field.shape
        encoding.check(field.name, DTYPE_NAMES[field.dtype], cols)
        if encoding.scale_dtype is None:
            return PLAIN, [(field.name, value_dtype, field.shape)]
        kind = encoding.name if encoding.name in ("int8", "int4") else "block_scaled"
        form = WeightForm(kind, encoding.block_of(cols), self._is_transposed)  # type: ignore[arg-type]
        scale_dtype = TORCH_DTYPES[encoding.scale_dtype]
        return form, [
            (field.name, value_dtype, encoding.value_shape(rows, cols)),
            (field.name + SCALE_SUFFIX, scale_dtype, encoding.scale_shape(rows, cols)),
        ]

    def _write_matrix(
        self, name: str, source: torch.Tensor, fields: Mapping[str, torch.Tensor]
    ) -> tuple[float, float]:
        """The sums of squared errors and squared weights."""
        if self._encoding.scale_dtype is None:
            return _round(source, fields[name])
        from hetero_cpu_kernels.quantize import quantize

        matrix = source.T.contiguous() if self._is_transposed else source
        values = fields[name].view(torch.uint8).numpy()
        scales = fields[name + SCALE_SUFFIX][0]  # [row blocks, column blocks]
        if scales.dtype == torch.bfloat16:
            scales = scales.view(torch.uint16)
        elif self._encoding.name == "int8":
            scales = scales[:, 0]
        return quantize(_words(matrix), self._encoding.name, values=values, scales=scales.numpy())  # type: ignore[arg-type]


def _round(source: torch.Tensor, target: torch.Tensor) -> tuple[float, float]:
    """Weights as the dtype of `target`. Raises ValueError when one of them is not finite there."""
    target.copy_(source)
    weights = source.float()
    squared_weight = float(weights.square().sum(dtype=torch.float64))
    squared_error = float((target.float() - weights).square().sum(dtype=torch.float64))
    if not np.isfinite(squared_error + squared_weight):
        raise ValueError("a weight is infinite or not a number, or too large for bfloat16")
    return squared_error, squared_weight


def _words(matrix: torch.Tensor) -> npt.NDArray[Any]:
    """Bits of bfloat16, or float32."""
    if matrix.dtype == torch.bfloat16:
        return matrix.view(torch.uint16).numpy()
    return matrix.float().numpy()


def is_matrix(shape: Sequence[int]) -> bool:
    """Whether a field of that shape is quantised; biases are not."""
    return len(shape) == 2


def make_quantizer(plan: ExpertPlan, experts: ExpertsFormat) -> Quantizer | None:
    """What writes experts in that format; None where they stay as they are. Raises ConfigError."""
    return None if experts == "checkpoint" else Quantizer(plan, ENCODINGS[experts])


def errors_by_layer(squares: Squares, num_layers: int) -> list[float]:
    """Root mean square error of each layer's weights over that of the weights.

    `squares`: of each record, in the order of rows, the sums that `Quantizer.write` gave: `[records, 2]`.
    """
    sums = squares.reshape(num_layers, -1, 2).sum(axis=1)  # [layers, 2]
    return [float(error) for error in np.sqrt(sums[:, 0] / np.maximum(sums[:, 1], np.finfo(float).tiny))]
