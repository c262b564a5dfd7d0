"""A record described to the CPU kernels, from its description to the fused kernels of the device.

Both know the same encodings. The CPU reads packed records as they lie, and no transposed matrix.
"""

from __future__ import annotations

from dataclasses import asdict

from hetero_cpu_kernels.experts import Bias, ExpertForm, Gate, Matrix, Scales
from hetero_gpu.experts.layout import ExpertFormat
from hetero_gpu.experts.layout import Matrix as DeviceMatrix
from hetero_gpu.packed import PackedLayout
from hetero_runtime.experts.kernel_format import UnreadableError


def in_place_form(described: ExpertFormat, packing: PackedLayout | None) -> ExpertForm:
    """The form of one expert as it lies in a bank with `packing`. Raises UnreadableError with the reason."""
    try:
        return ExpertForm(
            record_bytes=described.record_bytes if packing is None else packing.packed_bytes,
            up=_matrix(described.up),
            down=_matrix(described.down),
            gate=Gate(**asdict(described.gate)),
            packed_elements=0 if packing is None else packing.plain_bytes // 2,
        )
    except ValueError as error:
        raise UnreadableError(str(error)) from error


def _matrix(matrix: DeviceMatrix) -> Matrix:
    if matrix.is_transposed:
        raise UnreadableError("weights lie transposed, columns after columns")
    return Matrix(
        matrix.offset,
        matrix.encoding,
        matrix.rows,
        matrix.cols,
        scales=None if matrix.scales is None else Scales(**asdict(matrix.scales)),
        bias=None if matrix.bias is None else Bias(**asdict(matrix.bias)),
    )
