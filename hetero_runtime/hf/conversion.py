"""What transformers' loader would do with each tensor of a checkpoint, asked of transformers itself.

Its conversion tables say which checkpoint keys make up which parameter and by which operations; no name of
an architecture appears here. Facts about them: `transformers/conversion_mapping.py`, `core_model_loading.py`.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import Mxfp4Dequantize

from hetero_runtime.checkpoint.checkpoint import Checkpoint
from hetero_runtime.checkpoint.safetensors_file import TensorEntry
from hetero_runtime.errors import CheckpointError
from hetero_runtime.experts.sources import ExpertsModule, ParameterSource, Source

_EXPERTS_MARKS = ("has_gate", "has_bias", "is_transposed", "is_concatenated", "_apply_gate")
"""What transformers' `use_experts_implementation` leaves on every instance."""

_IGNORED_SUFFIX = "activation_scale"
"""Scales of activations: not used where weights are dequantised before they are multiplied."""


class SplitCheckpoint(NamedTuple):
    """Every tensor of a checkpoint on one of two sides."""

    experts: tuple[ExpertsModule, ...]
    backbone: dict[str, TensorEntry]


def expert_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that hold routed experts, by name, in the order of the layers."""
    return {
        name: module
        for name, module in model.named_modules()
        if all(hasattr(module, mark) for mark in _EXPERTS_MARKS)
    }


def split_checkpoint(model: PreTrainedModel, checkpoint: Checkpoint, hf_quantizer: Any) -> SplitCheckpoint:
    """Sort the tensors of `checkpoint` into those of routed experts and the rest.

    `model`: built on the meta device, with its parameters. `hf_quantizer`: what transformers made for the
    checkpoint's quantization_config, set to dequantise, or None. The rest includes tensors that the model
    does not know; transformers' loader decides about those. Raises CheckpointError when the model has no
    routed experts, or tensors of one are missing.
    """
    modules = expert_modules(model)
    if not modules:
        raise CheckpointError(f"{checkpoint.path}: {type(model).__name__} has no routed experts that we know")
    parameters = {
        f"{name}.{parameter}"
        for name, module in modules.items()
        for parameter, _ in module.named_parameters(recurse=False)
    }
    groups, backbone = _group_entries(model, checkpoint, hf_quantizer, parameters)
    block = getattr(getattr(hf_quantizer, "quantization_config", None), "weight_block_size", None)
    experts = []
    for name, module in modules.items():
        names = [parameter for parameter, _ in module.named_parameters(recurse=False)]
        sources = tuple(_parameter_source(model, f"{name}.{parameter}", groups, block) for parameter in names)
        num_experts = module.get_parameter(names[0]).shape[0]
        experts.append(ExpertsModule(name, num_experts, sources, bool(module.is_transposed)))
    return SplitCheckpoint(tuple(experts), backbone)


@dataclass(frozen=True)
class OperationChain:
    """The operations of one WeightConverter, for one expert of one parameter (see `sources.Conversion`).

    `stand_in` is a module tree that holds nothing but this parameter, for one expert and on meta: operations
    ask the model for the shape and dtype they should produce.
    """

    operations: tuple[Any, ...]
    source_patterns: tuple[str, ...]
    target_patterns: tuple[str, ...]
    parameter: str
    scale_patterns: dict[str, str]
    fused: frozenset[str]
    stand_in: nn.Module
    config: Any

    def run(self, weights: dict[str, torch.Tensor], scales: dict[str, torch.Tensor] | None) -> torch.Tensor:
        """See `sources.Conversion.run`."""
        tensors = weights | {self.scale_patterns[name]: scale for name, scale in (scales or {}).items()}
        values: dict[str, Any] = {
            name: [tensor[None] if name in self.fused else tensor] for name, tensor in tensors.items()
        }
        for operation in self.operations:
            if scales is None and isinstance(operation, Fp8Dequantize | Mxfp4Dequantize):
                continue
            values = operation.convert(
                values,
                source_patterns=list(self.source_patterns),
                target_patterns=list(self.target_patterns),
                full_layer_name=self.parameter,
                model=self.stand_in,
                config=self.config,
                missing_keys=None,
            )
        (value,) = values.values()
        tensor: torch.Tensor = value[0] if isinstance(value, list) else value
        return tensor.detach()[0]


def _group_entries(
    model: PreTrainedModel, checkpoint: Checkpoint, hf_quantizer: Any, parameters: set[str]
) -> tuple[dict[str, _Group], dict[str, TensorEntry]]:
    """Entries by expert parameter, in the order of the experts, and the entries that belong to none."""
    mapping = get_model_conversion_mapping(model, None, hf_quantizer)
    renamings = [transform for transform in mapping if isinstance(transform, WeightRenaming)]
    converters = [transform for transform in mapping if isinstance(transform, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    known = model.state_dict()
    groups: dict[str, _Group] = {}
    backbone = {}
    for key in sorted(checkpoint.entries, key=dot_natural_key):
        target, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, known)
        if target not in known and key in known:
            target, pattern = key, None
        if target not in parameters:
            backbone[key] = checkpoint.entries[key]
            continue
        converter = by_pattern[pattern] if pattern is not None else None
        group = groups.setdefault(target, _Group(converter, defaultdict(list)))
        group.entries[pattern or _UNCONVERTED].append(checkpoint.entries[key])
    return groups, backbone


_UNCONVERTED = "as it is"
"""Source name of a tensor that becomes a parameter without any operation."""


@dataclass
class _Group:
    """What the checkpoint has for one parameter: its converter and the entries of each source pattern."""

    converter: Any
    entries: dict[str, list[TensorEntry]]

    @property
    def operations(self) -> tuple[Any, ...]:
        """None of them when the tensor becomes the parameter as it is."""
        return tuple(self.converter.operations) if self.converter is not None else ()


def _parameter_source(
    model: PreTrainedModel, target: str, groups: dict[str, _Group], block: Any
) -> ParameterSource:
    parameter = model.get_parameter(target)
    num_experts, shape = parameter.shape[0], tuple(parameter.shape[1:])
    if target not in groups:
        raise CheckpointError(f"{target}: the checkpoint has no tensor for it; download the missing files")
    group = groups[target]
    _check_complete(target, group)
    sources = {
        pattern: _source(target, pattern, entries, num_experts)
        for pattern, entries in group.entries.items()
        if not pattern.rstrip("$").endswith(_IGNORED_SUFFIX)
    }
    scale_patterns = _pair_scales(target, sources)
    is_mxfp4 = any(isinstance(operation, Mxfp4Dequantize) for operation in group.operations)
    return ParameterSource(
        name=target.rpartition(".")[2],
        shape=shape,
        kind="mxfp4" if is_mxfp4 else ("block_scaled" if scale_patterns else "plain"),
        weights={name: s for name, s in sources.items() if name not in scale_patterns.values()},
        scales={name: sources[scale] for name, scale in scale_patterns.items()},
        block=(int(block[0]), int(block[1])) if block is not None else None,
        conversion=OperationChain(
            operations=group.operations,
            source_patterns=tuple(group.converter.source_patterns) if group.converter else (),
            target_patterns=tuple(group.converter.target_patterns) if group.converter else (),
            parameter=target,
            scale_patterns=scale_patterns,
            fused=frozenset(name for name, source in sources.items() if source.is_fused),
            stand_in=_stand_in(target, parameter),
            config=model.config,
        ),
    )


def _check_complete(target: str, group: _Group) -> None:
    """Every kind of tensor that the converter takes is there. Scales are optional: see `_pair_scales`."""
    optional = (_IGNORED_SUFFIX, "_scale_inv")
    patterns = group.converter.source_patterns if group.converter is not None else []
    missing = [p for p in patterns if p not in group.entries and not p.rstrip("$").endswith(optional)]
    if missing:
        found = ", ".join(entries[0].key for entries in group.entries.values())
        raise CheckpointError(
            f"{target}: the checkpoint has {found}, but no {', '.join(missing)}; download the missing files"
        )


def _source(target: str, pattern: str, entries: list[TensorEntry], num_experts: int) -> Source:
    """The entries of one pattern: one for all experts, or one for each, in their order."""
    is_per_expert = "*" in pattern
    if not is_per_expert and len(entries) == 1 and entries[0].shape[:1] == (num_experts,):
        return Source(tuple(entries), is_fused=True)
    if not is_per_expert:
        found = ", ".join(f"{entry.key} {list(entry.shape)}" for entry in entries[:3])
        raise CheckpointError(
            f"{target}: expected one tensor with {num_experts} experts as its first axis, found {found}"
        )
    numbers = [_expert_number(entry.key) for entry in entries]
    if numbers != list(range(num_experts)):
        missing = sorted(set(range(num_experts)) - set(numbers))
        what = f"experts {missing[:5]} are missing" if missing else "there are more than that"
        raise CheckpointError(
            f"{target}: the model has {num_experts} experts, the checkpoint {len(entries)} tensors like "
            f"{entries[0].key}: {what}; is the folder complete, and its config.json its own?"
        )
    odd = next((entry for entry in entries if (entry.shape, entry.dtype) != _kind(entries[0])), None)
    if odd is not None:
        raise CheckpointError(
            f"{target}: {entries[0].key} is {entries[0].dtype}{list(entries[0].shape)} but {odd.key} is "
            f"{odd.dtype}{list(odd.shape)}; all experts must have one shape and dtype"
        )
    return Source(tuple(entries), is_fused=False)


def _kind(entry: TensorEntry) -> tuple[tuple[int, ...], str]:
    return entry.shape, entry.dtype


def _expert_number(key: str) -> int:
    """The number of the expert in a key: the last of its parts that is a number."""
    numbers = [part for part in re.split(r"\.", key) if part.isdigit()]
    return int(numbers[-1]) if numbers else -1


def _pair_scales(target: str, sources: dict[str, Source]) -> dict[str, str]:
    """The pattern of the scales by the pattern of the weights that they scale; empty for plain weights."""
    scales = {_scaled_name(name): name for name in sources if _scaled_name(name) is not None}
    weights = [name for name in sources if name not in scales.values()]
    paired = {name: scales[name.rstrip("$")] for name in weights if name.rstrip("$") in scales}
    if scales and not (len(paired) == len(scales) == len(weights)):
        keys = ", ".join(source.entries[0].key for source in sources.values())
        raise CheckpointError(f"{target}: each quantised weight needs its scales, but there are only {keys}")
    return paired


def _scaled_name(pattern: str) -> str | None:
    """What the scales of this name scale; None when it names no scales."""
    name = pattern.rstrip("$")
    if name.endswith("_scales"):
        return name.removesuffix("_scales") + "_blocks"
    return name.removesuffix("_scale_inv") if name.endswith("_scale_inv") else None


def _stand_in(target: str, parameter: nn.Parameter) -> nn.Module:
    *path, name = target.split(".")
    root = node = nn.Module()
    for part in path:
        child = nn.Module()
        node.add_module(part, child)
        node = child
    node.register_parameter(name, nn.Parameter(parameter[:1].to("meta"), requires_grad=False))
    return root
