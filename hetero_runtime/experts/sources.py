"""Which bytes of the checkpoint make up which expert, and where they land in its record.

`hf.conversion` says what transformers would do; this module turns that into a layout, the form of each
field, and a list of reads. Layer 0 is worked out once; every other layer has to look like it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from hetero_runtime.checkpoint.lazy_tensor import TORCH_DTYPES
from hetero_runtime.checkpoint.safetensors_file import TensorEntry
from hetero_runtime.errors import CheckpointError
from hetero_runtime.experts.formats import MXFP4, PLAIN, SCALE_SUFFIX, WeightForm
from hetero_runtime.experts.placement import Placement, contiguous_strides, find_placements
from hetero_runtime.experts.reads import Read, Scatter
from hetero_runtime.experts.record import RecordLayout
from hetero_runtime.experts.table import RecordTable
from hetero_scheduler.keys import ExpertKey

PLAIN_DTYPES = ("F32", "F16", "BF16")
SCALED_DTYPES = ("F8_E4M3", "F8_E5M2", "I8")
"""I8 is two fp4 a byte."""
SCALE_DTYPES = ("F32", "F16", "BF16", "F8_E8M0", "U8")


class Conversion(Protocol):
    """transformers' own operations for one parameter, run on the tensors of one expert."""

    def run(self, weights: dict[str, torch.Tensor], scales: dict[str, torch.Tensor] | None) -> torch.Tensor:
        """One expert's parameter from its sources, by name as in `ParameterSource`.

        `scales` None: nothing is dequantised, quantised weights are moved as they are. Raises whatever the
        operations raise when the sources do not suit them.
        """


@dataclass(frozen=True)
class Source:
    """One tensor an expert, as the checkpoint has it: E entries, or (fused) one with E as its first axis."""

    entries: tuple[TensorEntry, ...]
    is_fused: bool

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape for one expert, without the expert axis."""
        return self.entries[0].shape[1:] if self.is_fused else self.entries[0].shape

    @property
    def dtype(self) -> str:
        """The safetensors name of the dtype."""
        return self.entries[0].dtype

    @property
    def unpacked_shape(self) -> tuple[int, ...]:
        """Shape in weights: `shape`, but with both fp4 of a byte counted."""
        return (*self.shape[:-1], 2 * self.shape[-1]) if self.dtype == "I8" else self.shape

    def of(self, expert: int, num_experts: int) -> TensorEntry:
        """The bytes of one expert, as an entry of their own (without the expert axis)."""
        if not self.is_fused:
            return self.entries[expert]
        whole = self.entries[0]
        num_bytes = whole.num_bytes // num_experts
        offset = whole.offset + expert * num_bytes
        return TensorEntry(whole.key, whole.file, whole.dtype, self.shape, offset, num_bytes)


@dataclass(frozen=True)
class ParameterSource:
    """One parameter of an Experts module. `scales` has the keys of `weights`, or is empty.

    `shape`: of one expert, as the module has it. `block`: the checkpoint's (rows, columns) of a scaled
    block, where its configuration names one.
    """

    name: str
    shape: tuple[int, ...]
    kind: str
    weights: dict[str, Source]
    scales: dict[str, Source]
    block: tuple[int, int] | None
    conversion: Conversion


@dataclass(frozen=True)
class ExpertsModule:
    """The routed experts of one layer, as the model names them, with the source of each parameter."""

    name: str
    num_experts: int
    parameters: tuple[ParameterSource, ...]
    is_transposed: bool = False
    """Matrices are [inputs, outputs]."""


@dataclass(frozen=True)
class FieldPlan:
    """One field of the record: what it holds and where each of its sources lands."""

    parameter: str
    is_scale: bool
    dtype: torch.dtype
    shape: tuple[int, ...]
    placements: dict[str, Placement]

    @property
    def name(self) -> str:
        """Name of the field in the record layout."""
        return self.parameter + (SCALE_SUFFIX if self.is_scale else "")


@dataclass(frozen=True)
class ExpertPlan:
    """How to build every record of a model."""

    modules: tuple[ExpertsModule, ...]
    fields: tuple[FieldPlan, ...]
    forms: dict[str, WeightForm]
    layout: RecordLayout

    @property
    def num_experts(self) -> int:
        """Experts of each layer."""
        return self.modules[0].num_experts

    @property
    def table(self) -> RecordTable:
        """The records that it builds."""
        return RecordTable(len(self.modules), self.num_experts, self.layout, self.forms)

    def reads(self) -> Iterator[Read]:
        """Every read that fills the bank; layer by layer, expert by expert."""
        for row in range(self.table.num_records):
            yield from self.reads_of(self.table.key(row), start=row * self.layout.record_bytes)

    def reads_of(self, key: ExpertKey, *, start: int) -> Iterator[Read]:
        """The reads of one record, whose first byte is to lie at byte `start` of a bank."""
        sources = {p.name: p for p in self.modules[key.layer].parameters}
        for field, placed in zip(self.layout.fields, self.fields, strict=True):
            source = sources[placed.parameter]
            tensors = source.scales if placed.is_scale else source.weights
            for name, placement in placed.placements.items():
                entry = tensors[name].of(key.expert, self.num_experts)
                yield _read(entry, placement, start + field.offset, field.dtype.itemsize)


def plan_experts(modules: Sequence[ExpertsModule]) -> ExpertPlan:
    """Layout, forms and placements, from layer 0. Raises CheckpointError where a layer differs from it."""
    fields: list[FieldPlan] = []
    forms: dict[str, WeightForm] = {}
    for parameter in modules[0].parameters:
        where = f"{modules[0].name}.{parameter.name}"
        forms[parameter.name], planned = _plan_parameter(where, parameter)
        fields += planned
    for module in modules[1:]:
        _check_alike(modules[0], module)
    layout = RecordLayout.of([(field.name, field.dtype, field.shape) for field in fields])
    return ExpertPlan(tuple(modules), tuple(fields), forms, layout)


def _plan_parameter(where: str, source: ParameterSource) -> tuple[WeightForm, list[FieldPlan]]:
    if source.kind == "mxfp4":
        return MXFP4, _plan_mxfp4(where, source)
    placements = find_placements(
        {name: tensor.shape for name, tensor in source.weights.items()},
        lambda numbers: _move(where, source, numbers),
    )
    if placements is None:
        raise CheckpointError(
            f"{where}: transformers rearranges its weights in a way that cannot be read in place; this "
            f"checkpoint is not covered, save it again with save_pretrained"
        )
    dtype = TORCH_DTYPES[
        _the_dtype(where, source.weights, PLAIN_DTYPES if not source.scales else SCALED_DTYPES)
    ]
    if not source.scales:
        return PLAIN, [FieldPlan(source.name, False, dtype, source.shape, placements)]
    form, scale_field = _plan_scales(where, source, placements)
    rows, cols = next(iter(source.weights.values())).shape
    raw = FieldPlan(source.name, False, dtype, (len(placements) * rows, cols), placements)
    return form, [raw, scale_field]


def _move(where: str, source: ParameterSource, numbers: dict[str, torch.Tensor]) -> torch.Tensor:
    """Run the operations on element numbers and hold the result to the parameter's shape."""
    found = {name: f"{tensor.dtype}{list(tensor.shape)}" for name, tensor in source.weights.items()}
    try:
        moved = source.conversion.run(numbers, None)
    except (ValueError, RuntimeError) as error:
        raise CheckpointError(f"{where}: transformers cannot convert {found}: {error}") from error
    expected = source.shape
    if any(tensor.dtype == "I8" for tensor in source.weights.values()):
        expected = (*expected[:-1], expected[-1] // 2)
    if tuple(moved.shape) != expected:
        raise CheckpointError(
            f"{where}: the model has experts of {list(source.shape)} there, the checkpoint {found}, which "
            f"makes {list(moved.shape)}; are all tensors there, and is config.json that of this checkpoint?"
        )
    return moved


def _plan_mxfp4(where: str, source: ParameterSource) -> list[FieldPlan]:
    """Blocks `[out, groups, 16]` and scales `[out, groups]`, byte for byte."""
    (blocks,), (scales,) = source.weights.values(), source.scales.values()
    inputs, outputs = source.shape
    expected = (outputs, inputs // 32, 16)
    if (blocks.shape, scales.shape) != (expected, expected[:2]) or {blocks.dtype, scales.dtype} != {"U8"}:
        raise CheckpointError(
            f"{where}: expected U8 blocks {list(expected)} and scales {list(expected[:2])}, the checkpoint "
            f"has {blocks.dtype}{list(blocks.shape)} and {scales.dtype}{list(scales.shape)}"
        )
    return [_whole(source, is_scale=False), _whole(source, is_scale=True)]


def _plan_scales(
    where: str, source: ParameterSource, placements: dict[str, Placement]
) -> tuple[WeightForm, FieldPlan]:
    """Scales of a block-scaled parameter: one [row blocks, column blocks] grid a part, in their order."""
    parts = sorted(placements, key=lambda name: placements[name].start)
    shapes = {source.weights[name].unpacked_shape for name in parts}
    grids = {_grid(source.scales[name].shape) for name in parts}
    if len(shapes) > 1 or len(grids) > 1 or not all(placements[name].is_contiguous for name in parts):
        raise CheckpointError(
            f"{where}: quantised parts of different shapes, or transposed ({shapes}, scales {grids}); this "
            f"checkpoint is not covered"
        )
    (shape,), (grid,) = shapes, grids
    block = _block(where, (shape[0], shape[1]), grid, source.block)
    dtype = TORCH_DTYPES[_the_dtype(where, source.scales, SCALE_DTYPES)]
    numel = math.prod(grid)
    placed = {name: Placement(grid, contiguous_strides(grid), i * numel) for i, name in enumerate(parts)}
    return WeightForm("block_scaled", block), FieldPlan(source.name, True, dtype, (len(parts), *grid), placed)


def _whole(source: ParameterSource, *, is_scale: bool) -> FieldPlan:
    """A field that is one source tensor, byte for byte."""
    ((name, tensor),) = (source.scales if is_scale else source.weights).items()
    placement = Placement(tensor.shape, contiguous_strides(tensor.shape), 0)
    return FieldPlan(source.name, is_scale, TORCH_DTYPES[tensor.dtype], tensor.shape, {name: placement})


def _grid(shape: tuple[int, ...]) -> tuple[int, int]:
    """A scale tensor as a grid of blocks; one scale for the whole tensor is a grid of one."""
    return (shape[0], shape[1]) if len(shape) == 2 else (1, 1)


def _block(
    where: str, shape: tuple[int, int], grid: tuple[int, int], configured: tuple[int, int] | None
) -> tuple[int, int]:
    """Rows and columns of a block: as configured where that gives the grid, else by dividing evenly."""
    if configured is not None and all(
        -(-n // b) == g for n, b, g in zip(shape, configured, grid, strict=True)
    ):
        return configured
    if any(n % g for n, g in zip(shape, grid, strict=True)):
        raise CheckpointError(
            f"{where}: a weight of {list(shape)} has a scale grid of {list(grid)}, which neither "
            f"weight_block_size {configured} nor an even division explains"
        )
    return shape[0] // grid[0], shape[1] // grid[1]


def _the_dtype(where: str, tensors: dict[str, Source], allowed: tuple[str, ...]) -> str:
    dtypes = sorted({tensor.dtype for tensor in tensors.values()})
    if len(dtypes) > 1 or dtypes[0] not in allowed:
        keys = ", ".join(tensor.entries[0].key for tensor in tensors.values())
        raise CheckpointError(
            f"{where}: {keys} are {' and '.join(dtypes)}; expected one of {', '.join(allowed)}"
        )
    return dtypes[0]


def _check_alike(first: ExpertsModule, other: ExpertsModule) -> None:
    ours, theirs = _signature(first), _signature(other)
    if ours == theirs:
        return
    name = next((n for n in ours if ours[n] != theirs.get(n)), next(iter(theirs)))
    raise CheckpointError(
        f"{first.name} and {other.name} differ in {name}: {ours.get(name)} and {theirs.get(name)}; all "
        f"layers must have experts of one shape and dtype"
    )


def _signature(module: ExpertsModule) -> dict[str, str]:
    """What must be the same in every layer, as text by name."""
    signature = {"num_experts": str(module.num_experts)}
    for parameter in module.parameters:
        tensors = [*parameter.weights.items(), *((n + SCALE_SUFFIX, s) for n, s in parameter.scales.items())]
        text = ", ".join(f"{name} {source.dtype}{list(source.shape)}" for name, source in tensors)
        signature[parameter.name] = f"{parameter.kind} {list(parameter.shape)} from {text}"
    return signature


def _read(entry: TensorEntry, placement: Placement, field_start: int, itemsize: int) -> Read:
    scatter = None
    if not placement.is_contiguous:
        scatter = Scatter(placement.shape, placement.strides, itemsize)
    return Read(entry.file, entry.offset, entry.num_bytes, field_start + placement.start * itemsize, scatter)
