"""The routed experts of a checkpoint: which layers have them, and how large one record is."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from hetero_runtime.checkpoint import TensorEntry
from hetero_runtime.errors import CheckpointError
from hetero_runtime.experts.record import record_size
from hetero_runtime.plan.names import ExpertTensor, parse_expert


class ExpertField(NamedTuple):
    """One field of a record, as the checkpoint has it."""

    name: str
    dtype: str
    num_bytes: int


@dataclass(frozen=True)
class RoutedExperts:
    """What the headers say about routed experts, and the tensors that are none."""

    layers: tuple[int, ...]
    record_bytes: int
    dtype: str
    """Dtype that most bytes of an expert have on disk."""
    is_bf16: bool
    """Whether every byte of an expert is bf16."""
    fields: tuple[ExpertField, ...]
    """What one expert is made of."""
    unused_bytes: int
    """Experts of multi-token-prediction layers, which nobody loads."""
    others: tuple[TensorEntry, ...]


def read_routed(
    path: Path, entries: Iterable[TensorEntry], num_layers: int, num_experts: int
) -> RoutedExperts:
    """Sort `entries` and measure the record. CheckpointError when experts are missing or unlike."""
    others: list[TensorEntry] = []
    fields: dict[tuple[int, int | None], dict[str, int]] = defaultdict(lambda: defaultdict(int))
    dtypes: Counter[str] = Counter()
    field_dtypes: dict[str, str] = {}
    unused = 0
    for entry in entries:
        tensor = parse_expert(entry.key)
        if tensor is None:
            others.append(entry)
        elif tensor.layer >= num_layers or "mtp." in entry.key:
            unused += entry.num_bytes
        else:
            share = _expert_share(entry, tensor, num_experts)
            fields[tensor.layer, tensor.expert][tensor.field] += share
            dtypes[entry.dtype] += share
            field_dtypes[tensor.field] = entry.dtype
    if not fields:
        raise CheckpointError(
            f"{path}: config.json speaks of {num_experts} experts, but no tensor is named like one "
            f"(.experts.N. or .experts.gate_up_proj); are these the weights of that config?"
        )
    _check_complete(path, fields, num_experts)
    return RoutedExperts(
        layers=tuple(sorted({layer for layer, _ in fields})),
        record_bytes=_record_bytes(path, fields),
        dtype=dtypes.most_common(1)[0][0],
        is_bf16=set(dtypes) == {"BF16"},
        fields=tuple(
            ExpertField(name, field_dtypes[name], num_bytes)
            for name, num_bytes in next(iter(fields.values())).items()
        ),
        unused_bytes=unused,
        others=tuple(others),
    )


def _expert_share(entry: TensorEntry, tensor: ExpertTensor, num_experts: int) -> int:
    """Bytes that `entry` adds to the record of one expert."""
    if tensor.expert is not None:
        return entry.num_bytes
    if not entry.shape or entry.shape[0] != num_experts:
        raise CheckpointError(
            f"{entry.file}: {entry.key} has shape {list(entry.shape)}; its first dimension must be the "
            f"{num_experts} experts that config.json names"
        )
    return entry.num_bytes // num_experts


def _check_complete(
    path: Path, fields: dict[tuple[int, int | None], dict[str, int]], num_experts: int
) -> None:
    """Each layer has either all experts in one tensor, or each of 0 .. num_experts - 1 once."""
    experts: dict[int, set[int]] = defaultdict(set)
    for layer, expert in fields:
        experts[layer] |= set(range(num_experts)) if expert is None else {expert}
    for layer, found in sorted(experts.items()):
        if found != set(range(num_experts)):
            raise CheckpointError(
                f"{path}: layer {layer} has {len(found)} of the {num_experts} experts that config.json "
                f"names; a shard is missing or config.json belongs to another model"
            )


def _record_bytes(path: Path, fields: dict[tuple[int, int | None], dict[str, int]]) -> int:
    """Bytes of one record; all experts must come to the same."""
    sizes = {key: record_size(size.values()) for key, size in fields.items()}
    (layer, expert), record = next(iter(sizes.items()))
    for (other_layer, other_expert), size in sizes.items():
        if size != record:
            raise CheckpointError(
                f"{path}: expert {other_expert} of layer {other_layer} takes {size} bytes, expert {expert} "
                f"of layer {layer} {record}; experts of one model must all be alike to share slabs"
            )
    return record
