"""Random experts as the CPU kernels read them, and what the reference gives: for tests and bench."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hetero_cpu_kernels.experts.call import Routing
from hetero_cpu_kernels.experts.form import BITS, Bias, Encoding, ExpertForm, Gate, Matrix, Scales
from hetero_cpu_kernels.experts.reference import expert_reference
from hetero_gpu.packed.layout import PackedLayout
from hetero_gpu.packed.reference import pack_reference

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

GATES = {
    "silu": Gate(),
    "clamped": Gate("clamped_silu", limit=0.5),
    "gpt_oss": Gate("gpt_oss", is_interleaved=True, limit=1.5, alpha=1.702),
}
FORMATS = ("float32", "bfloat16", "packed", "float16", "fp8", "int8", "int4", "fp4")
_ALIGN = 128


def make_form(
    name: str, hidden: int, inner: int, *, gate: str = "silu", has_bias: bool = False
) -> ExpertForm:
    """A record of format `name`, fields one after another at multiples of 128 bytes."""
    encoding: Encoding = "bfloat16" if name == "packed" else name  # type: ignore[assignment]
    up = _matrix(encoding, 2 * inner, hidden, start=0, has_bias=has_bias)
    down = _matrix(encoding, hidden, inner, start=_aligned(up.end), has_bias=has_bias)
    record_bytes = -(-down.end // 4096) * 4096
    packed_elements = 0
    if name == "packed":
        packed_elements = record_bytes // 2
        record_bytes = PackedLayout(packed_elements).packed_bytes
    return ExpertForm(record_bytes, up, down, GATES[gate], packed_elements)


def _matrix(encoding: Encoding, rows: int, cols: int, *, start: int, has_bias: bool) -> Matrix:
    end = start + rows * cols * BITS[encoding] // 8
    scales = None
    if encoding not in ("float32", "float16", "bfloat16"):
        scales = {
            "fp8": Scales(_aligned(end), "float32", 128, 128, parts=2 if rows % 2 == 0 else 1),
            "int8": Scales(_aligned(end), "float16", 1, cols),
            "int4": Scales(_aligned(end), "bfloat16", 1, 32),
            "fp4": Scales(_aligned(end), "e8m0", 1, 32),
        }[encoding]
        end = Matrix(start, encoding, rows, cols, scales).end
    bias_encoding = encoding if encoding in ("float32", "float16") else "bfloat16"
    bias = Bias(_aligned(end), bias_encoding) if has_bias else None  # type: ignore[arg-type]
    return Matrix(start, encoding, rows, cols, scales, bias)


def random_record(form: ExpertForm, rng: np.random.Generator) -> tuple[Bytes, Bytes]:
    """A record before packing, and as it lies in a bank."""
    plain_bytes = 2 * form.packed_elements or form.record_bytes
    record = np.zeros(plain_bytes, dtype=np.uint8)
    for matrix in (form.up, form.down):
        _fill(record, matrix, rng)
    if not form.packed_elements:
        return record, record
    packed = pack_reference(record, PackedLayout(form.packed_elements))
    assert packed is not None
    return record, packed


def layer_reference(hidden: Floats, plain: list[Bytes], form: ExpertForm, routing: Routing) -> Floats:
    """Weighted sum of the experts, `[T, H]`."""
    out = np.zeros_like(hidden)
    for i, record in enumerate(plain):
        part = slice(routing.bounds[i], routing.bounds[i + 1])
        tokens = routing.tokens[part]
        out[tokens] += routing.weights[part, None] * expert_reference(hidden[tokens], record, form)
    return out


def random_routing(form: ExpertForm, counts: list[int], num_tokens: int, rng: np.random.Generator) -> Routing:
    """Expert i, the i-th record, gets `counts[i]` random tokens."""
    tokens = np.concatenate([np.sort(rng.permutation(num_tokens)[:count]) for count in counts])
    return Routing(
        offsets=np.arange(len(counts), dtype=np.int64) * form.record_bytes,
        bounds=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        tokens=tokens.astype(np.int64),
        weights=rng.uniform(0.1, 1, len(tokens)).astype(np.float32),
    )


def relative_error(out: Floats, reference: Floats) -> float:
    """Root mean square of the difference, over that of the reference."""
    return float(np.linalg.norm(out - reference) / np.linalg.norm(reference))


def to_bfloat16(values: Floats) -> npt.NDArray[np.uint16]:
    return (values.astype(np.float32).view(np.uint32) + 0x8000 >> 16).astype(np.uint16)


def _fill(record: Bytes, matrix: Matrix, rng: np.random.Generator) -> None:
    count = matrix.rows * matrix.cols
    spread = matrix.cols**-0.5
    if matrix.scales is None:
        values = rng.standard_normal(count).astype(np.float32) * spread
        values[rng.integers(0, count, 1 + count // 8000)] *= 2.0**-30  # escapes, when packed
        values[rng.integers(0, count, 1 + count // 8000)] = 0.0
        _write(record, matrix.offset, values, matrix.encoding)
    else:
        codes = rng.integers(0, 256, matrix.num_bytes, dtype=np.uint8)
        if matrix.encoding == "fp8":
            codes[codes & 0x7F == 0x7F] = 0  # NaN
        record[matrix.offset : matrix.offset + len(codes)] = codes
        size = {"fp8": 200.0, "int8": 80.0, "int4": 5.0, "fp4": 3.0}[matrix.encoding]
        blocks = int(np.prod(matrix.scale_shape))
        if matrix.scales.encoding == "e8m0":
            exponents = 127 + int(np.log2(spread / size)) + rng.integers(-1, 2, blocks)
            record[matrix.scales.offset : matrix.scales.offset + blocks] = exponents
        else:
            factors = rng.uniform(0.5, 1.5, blocks).astype(np.float32) * spread / size
            _write(record, matrix.scales.offset, factors, matrix.scales.encoding)
    if matrix.bias is not None:
        bias = rng.standard_normal(matrix.rows).astype(np.float32) * 0.1
        _write(record, matrix.bias.offset, bias, matrix.bias.encoding)


def _write(record: Bytes, offset: int, values: Floats, encoding: str) -> None:
    data = to_bfloat16(values) if encoding == "bfloat16" else values.astype(encoding)
    octets = data.view(np.uint8)
    record[offset : offset + len(octets)] = octets


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGN) * _ALIGN
