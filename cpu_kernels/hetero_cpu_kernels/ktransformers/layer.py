"""One layer's experts in kt-kernel: its own copy of the weights, repacked for its kernels.

    encoding    class                  from                               multiples of
    bfloat16    AMXBF16_MOE            the records                        32
    fp8         AMXFP8_MOE             the records, blocks of 128 x 128   128
    int4        AMXInt4_KGroup_MOE     the records, groups of 32          128
    int8        AMXInt8_MOE            bfloat16, quantised anew by it     64

int8 and int4 are computed with activations that kt-kernel rounds to int8: 1 to 2 % of a layer's sum. The
classes are named AMX on every processor with AVX-512; kt-kernel chooses what executes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hetero_cpu_kernels.experts.form import BITS, ExpertForm, Gate, Matrix
from hetero_cpu_kernels.experts.reference import dequantize
from hetero_cpu_kernels.ktransformers.library import load, quiet
from hetero_cpu_kernels.ktransformers.pool import KtPool

Halves = npt.NDArray[np.uint16]
Floats = npt.NDArray[np.float32]
Integers = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]


_ALIGN_BYTES = 64
_TOKEN_STEP = 32
"""Its memory for activations is of whole steps of so many tokens."""
_INT4_EXPERTS = 4
"""Its own memory for int4 is aligned for so many experts; with others it reads where it may not."""


class _Kind(NamedTuple):
    name: str
    multiple: int
    bits: int = 0
    group: int = 0


_KINDS = {
    "bfloat16": _Kind("AMXBF16_MOE", 32),
    "fp8": _Kind("AMXFP8_MOE", 128, 8, 128),
    "int4": _Kind("AMXInt4_KGroup_MOE", 128, 4, 32),
    "int8": _Kind("AMXInt8_MOE", 64),
}
_SCALES = {"fp8": ("float32", 128, 128), "int4": ("bfloat16", 1, 32)}
"""Encoding of the scales and their blocks, where kt-kernel reads those of the records."""


def check_form(form: ExpertForm, num_experts: int) -> None:
    """Raises ValueError for a layer of experts that kt-kernel cannot compute."""
    if form.up.encoding == "int4" and num_experts % _INT4_EXPERTS:
        raise ValueError(
            f"for int4 it needs a multiple of {_INT4_EXPERTS} experts, and there are {num_experts}"
        )
    for matrix in (form.up, form.down):
        kind = _KINDS.get(matrix.encoding)
        if kind is None:
            raise ValueError(f"it has no kernels for {matrix.encoding}; it has for {', '.join(_KINDS)}")
        if matrix.encoding != form.up.encoding:
            raise ValueError(
                f"its gate and down matrices are {form.up.encoding} and {matrix.encoding}, not alike"
            )
        if matrix.bias is not None:
            raise ValueError("it adds no biases")
        _check_scales(matrix)
        if form.intermediate % kind.multiple or form.hidden % kind.multiple:
            raise ValueError(
                f"for {matrix.encoding} it needs multiples of {kind.multiple}, and experts are of "
                f"{form.hidden} and {form.intermediate} columns"
            )
    if form.gate != Gate():
        raise ValueError(f"of gate functions it has silu over halves, not {form.gate}")


def _check_scales(matrix: Matrix) -> None:
    wanted = _SCALES.get(matrix.encoding)
    if wanted is None or matrix.scales is None:
        return
    scales = matrix.scales
    is_cut = matrix.rows // scales.parts % scales.block_rows
    if (scales.encoding, scales.block_rows, scales.block_cols) != wanted or is_cut:
        raise ValueError(
            f"{matrix.encoding} needs {wanted[0]} scales of {wanted[1]} x {wanted[2]} blocks, and there are "
            f"{scales.encoding} of {scales.block_rows} x {scales.block_cols}"
        )


class CallMemory:
    """What goes into a call and comes out of it, for one layer after another: their models keep one.

    `top_k`: the most experts of one token; `most_tokens`: of one call (kt-kernel would write more of them
    behind the end of its memory).
    """

    def __init__(self, hidden: int, *, top_k: int, most_tokens: int) -> None:
        self.top_k, self.most_tokens = top_k, most_tokens
        self.num_tokens = _zeros((1,), np.int32)
        self.experts = _zeros((most_tokens, top_k), np.int64)
        self.weights = _zeros((most_tokens, top_k), np.float32)
        self.hidden = _zeros((most_tokens, hidden), np.uint16)
        self.out = _zeros((most_tokens, hidden), np.uint16)

    def fill(self, hidden: Halves, experts: Integers, weights: Floats) -> None:
        """Write what goes in."""
        tokens = len(hidden)
        assert tokens <= self.most_tokens, f"{tokens} tokens in a call for {self.most_tokens}"
        self.num_tokens[0] = tokens
        self.hidden[:tokens], self.experts[:tokens], self.weights[:tokens] = hidden, experts, weights

    @property
    def addresses(self) -> tuple[int, ...]:
        """As kt-kernel's task takes them: experts, weights, hidden, out."""
        return tuple(_at(array) for array in (self.experts, self.weights, self.hidden, self.out))


class KtLayer:
    """`records`: uint8 `[experts, bytes]`, plain, all experts of the layer; only read while this is made.

    One call at a time of all layers that share a pool or `memory`. Raises ValueError for what `check_form`
    refuses.
    """

    def __init__(self, pool: KtPool, form: ExpertForm, records: Bytes, *, memory: CallMemory) -> None:
        check_form(form, len(records))
        self.form = form
        self._pool, self._memory = pool, memory
        self._is_on_device = _zeros((len(records),), np.bool_)  # none is: it computes all it is asked for
        with quiet():
            self._moe = self._make(records)
        # Made once: each task is memory that kt-kernel never gives back.
        self._task = self._moe.forward_task(_at(memory.num_tokens), memory.top_k, *memory.addresses, False)

    def submit(self, hidden: Halves, experts: Integers, weights: Floats) -> None:
        """Start one call, which `wait` ends. `hidden`: bfloat16 bits `[T, H]`, `experts` `[T, K]` with -1 for
        none, `weights` `[T, K]`, all copied; K is `top_k`, T at most `most_tokens`."""
        self._memory.fill(hidden, experts, weights)
        self._pool.submit(self._task)

    def wait(self) -> Halves:
        """The layer's sum as bfloat16 bits `[T, H]`: a view, until the next call."""
        self._pool.wait()
        out: Halves = self._memory.out[: self._memory.num_tokens[0]]
        return out

    def _make(self, records: Bytes) -> Any:
        """kt-kernel's layer with its copy of the weights."""
        module, kind, form = load().moe, _KINDS[self.form.up.encoding], self.form
        config = module.MOEConfig(
            len(records), self._memory.top_k, form.hidden, form.intermediate, _at(self._is_on_device)
        )
        config.layer_idx, config.pool = 0, self._pool.backend
        config.max_len = -(-self._memory.most_tokens // _TOKEN_STEP) * _TOKEN_STEP
        held: list[Halves] = []
        if form.up.encoding == "int8":
            held = _bfloat16_matrices(records, form)
            config.gate_proj, config.up_proj, config.down_proj = (_at(array) for array in held)
            config.save = config.load = False
        else:
            parts = [(form.up, 0, 2), (form.up, 1, 2), (form.down, 0, 1)]
            config.gate_projs, config.up_projs, config.down_projs = (
                [[_values_at(record, *part) for record in records]] for part in parts
            )
            config.gate_scales, config.up_scales, config.down_scales = (
                [[_scales_at(record, *part) for record in records]] for part in parts
            )
            config.quant_config.bits, config.quant_config.group_size = kind.bits, kind.group
        moe = getattr(module, kind.name)(config)
        order = np.arange(len(records), dtype=np.int64)
        self._pool.submit(moe.load_weights_task(_at(order)))
        self._pool.wait()
        del held, order  # read to the end
        return moe


def _at(array: npt.NDArray[Any]) -> int:
    return int(array.__array_interface__["data"][0])


def _zeros(shape: tuple[int, ...], dtype: type[np.generic]) -> npt.NDArray[Any]:
    """Zeros at a multiple of 64 bytes, which kt-kernel's loads rely on."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    memory = np.zeros(size + _ALIGN_BYTES, dtype=np.uint8)
    start = -_at(memory) % _ALIGN_BYTES
    return memory[start : start + size].view(dtype).reshape(shape)


def _values_at(record: Bytes, matrix: Matrix, part: int, parts: int) -> int:
    """Address of one of the matrices that are fused by rows."""
    return _at(record) + matrix.offset + part * matrix.num_bytes // parts


def _scales_at(record: Bytes, matrix: Matrix, part: int, parts: int) -> int:
    """The same of its scales; 0 without."""
    if matrix.scales is None:
        return 0
    num_scales = int(np.prod(matrix.scale_shape))
    return _at(record) + matrix.scales.offset + part * num_scales * BITS[matrix.scales.encoding] // 8 // parts


def _bfloat16_matrices(records: Bytes, form: ExpertForm) -> list[Halves]:
    """Gates, ups and downs of all experts as bfloat16 bits: `[experts, I, H]` twice, `[experts, H, I]`."""
    inner = form.intermediate
    gates, ups = (np.empty((len(records), inner, form.hidden), dtype=np.uint16) for _ in range(2))
    downs = np.empty((len(records), form.hidden, inner), dtype=np.uint16)
    for number, record in enumerate(records):
        fused = to_bfloat16(dequantize(record, form.up))
        gates[number], ups[number] = fused[:inner], fused[inner:]
        downs[number] = to_bfloat16(dequantize(record, form.down))
    return [gates, ups, downs]


def to_bfloat16(values: Floats) -> Halves:
    """float32 rounded to bfloat16 bits, to even; no NaN."""
    bits = values.view(np.uint32)
    rounded: Halves = (bits + 0x7FFF + (bits >> 16 & 1) >> 16).astype(np.uint16)
    return rounded
