"""The shape of a model, from its config.json and safetensors headers alone."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hetero_gpu.packed import PackedLayout
from hetero_runtime.checkpoint import Checkpoint, TensorEntry
from hetero_runtime.checkpoint.checkpoint import CONFIG_NAME
from hetero_runtime.checkpoint.safetensors_file import DTYPE_BYTES
from hetero_runtime.config.tree import Dtype
from hetero_runtime.errors import CheckpointError
from hetero_runtime.hf.architectures import architecture_of
from hetero_runtime.plan.kv import KvGeometry, head_size, layer_kinds, read_kv
from hetero_runtime.plan.model_config import NUM_EXPERTS, TOP_K, TextConfig, rope_types
from hetero_runtime.plan.names import Region, region_of
from hetero_runtime.plan.routed import ExpertField, read_routed

if TYPE_CHECKING:
    from hetero_runtime.plan.drafter import DrafterGeometry
    from hetero_runtime.plan.prefix import ProfiledPrefix

ITEMSIZE: dict[Dtype, int] = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes an element of the dtypes that the runtime computes in."""
_DTYPES: dict[str, Dtype] = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


@dataclass(frozen=True)
class TensorGroup:
    """Weights of one region, which are kept at the dtype of computation."""

    float_elements: int = 0
    """Elements that become the dtype of computation (fp8 ones are dequantised)."""
    other_bytes: int = 0
    """Bytes of integer tensors, kept as they are."""
    largest_bytes: int = 0
    """Bytes on disk of the largest tensor."""

    def num_bytes(self, itemsize: int) -> int:
        """Bytes in memory at `itemsize` bytes an element."""
        return self.float_elements * itemsize + self.other_bytes


@dataclass(frozen=True)
class AttentionGeometry:
    """What prefill needs room for beside the cache."""

    num_heads: int
    token_elements: int
    """Query, key, value and output of one token, keys and values repeated to all heads."""
    is_eager: bool
    """Attention sinks: scores are written out, heads x tokens x tokens, since SDPA has no sinks."""


@dataclass(frozen=True)
class LookaheadGeometry:
    """What a lookahead predictor takes and says. `num_bytes`: its weights, at two bytes each."""

    num_bytes: int
    semantic_depth: int
    """First layers whose routing says enough of what comes."""
    profiled: tuple[ProfiledPrefix, ...] = ()
    """The fastest prefixes that were measured on this device."""


@dataclass(frozen=True)
class Geometry:
    """Numbers of one checkpoint that decide where things fit."""

    path: Path
    model_type: str
    dtype: Dtype
    """What the checkpoint was saved for; `model.dtype: auto` computes in it."""
    num_layers: int
    moe_layers: tuple[int, ...]
    """Decoder layers that have routed experts."""
    num_experts: int
    top_k: int
    hidden_size: int
    moe_intermediate_size: int
    dense_intermediate_size: int
    """Widest feed-forward outside the routed experts."""
    vocab_size: int
    max_context: int
    """Tokens that the positions of the model reach."""
    record_bytes: int
    """One expert in host bank or slab, scales and biases included, padded."""
    expert_dtype: str
    """Dtype of most bytes of an expert, in safetensors' words; or the format of `model.experts`."""
    backbone: TensorGroup
    shared: TensorGroup
    vision: TensorGroup
    attention: AttentionGeometry
    kv: KvGeometry
    layer_kinds: frozenset[str] = frozenset()
    """Of attention, in transformers' words."""
    rope_types: frozenset[str] = frozenset()
    """Of its rotary embedding, or embeddings."""
    expert_fields: tuple[ExpertField, ...] = ()
    """What one expert is made of on disk."""
    source_record_bytes: int = 0
    """One expert as on disk, where the host bank has it in another format; else 0."""
    has_bf16_experts: bool = False
    """Whether experts are bf16 and nothing else: such records can be packed."""
    predictor_bytes: int = 0
    """Weights of the trained predictor that serves this model; 0 where none is in use."""
    calibration_bytes: int = 0
    """Of the calibration that a routing policy reads; 0 where none is in use."""
    drafter: DrafterGeometry | None = None
    """The small model that drafts for this one; None where there is none."""
    lookahead: LookaheadGeometry | None = None
    """The lookahead predictor that serves this model; None where none is in use."""
    notes: tuple[str, ...] = ()
    """What was left out, for the report."""

    @property
    def num_moe_layers(self) -> int:
        return len(self.moe_layers)

    @property
    def num_routed_experts(self) -> int:
        """Routed experts of all layers."""
        return self.num_moe_layers * self.num_experts

    @property
    def bank_bytes(self) -> int:
        """Bytes of the records of all routed experts."""
        return self.num_routed_experts * self.record_bytes

    @property
    def packed_record_bytes(self) -> int | None:
        """One expert in a packed host bank; None where packing is impossible or gains nothing."""
        packing = PackedLayout.of(self.record_bytes) if self.has_bf16_experts else None
        return None if packing is None else packing.packed_bytes


def read_geometry(model_dir: str | Path) -> Geometry:
    """Read `model_dir`'s config.json and safetensors headers.

    Raises CheckpointError, naming the file and the fix, for a missing or truncated shard, a missing or
    dense config, an architecture that is not covered, and experts that are not all there or not alike.
    """
    checkpoint = Checkpoint.open(model_dir)
    config = TextConfig.of(checkpoint.path / CONFIG_NAME, checkpoint.config)
    num_experts, top_k = _expert_numbers(config)
    if checkpoint.config.get("architectures"):
        architecture_of(checkpoint.config)
    num_layers = config.integer("num_hidden_layers")
    routed = read_routed(checkpoint.path, checkpoint.entries.values(), num_layers, num_experts)
    regions = _by_region(routed.others, num_layers)
    backbone = regions["backbone"]
    return Geometry(
        path=checkpoint.path,
        model_type=str(checkpoint.config.get("model_type", "unknown")),
        dtype=_dtype(checkpoint.config, config, backbone),
        num_layers=num_layers,
        moe_layers=routed.layers,
        num_experts=num_experts,
        top_k=top_k,
        hidden_size=config.integer("hidden_size"),
        moe_intermediate_size=config.integer("moe_intermediate_size", "intermediate_size"),
        dense_intermediate_size=_dense_width(config),
        vocab_size=config.integer("vocab_size"),
        max_context=config.integer("max_position_embeddings"),
        record_bytes=routed.record_bytes,
        expert_dtype=routed.dtype,
        backbone=tensor_group(_without_tied_head(backbone, config)),
        shared=tensor_group(regions["shared"]),
        vision=tensor_group(regions["vision"]),
        attention=_attention(config, backbone),
        kv=read_kv(config, num_layers),
        layer_kinds=frozenset(layer_kinds(config, num_layers, config.optional("sliding_window"))),
        rope_types=rope_types(config.values.get("rope_parameters") or config.values.get("rope_scaling")),
        expert_fields=routed.fields,
        has_bf16_experts=routed.is_bf16,
        notes=_notes(regions["mtp"], routed.unused_bytes),
    )


def _expert_numbers(config: TextConfig) -> tuple[int, int]:
    num_experts = config.optional(*NUM_EXPERTS)
    if not num_experts:
        raise CheckpointError(
            f"{config.file}: describes a model without routed experts (none of {', '.join(NUM_EXPERTS)} is "
            f"set); this runtime is for mixture-of-experts models, a dense one runs in transformers as it is"
        )
    top_k = config.integer(*TOP_K)
    if not 1 <= top_k <= num_experts:
        raise CheckpointError(
            f"{config.file}: routes a token to {top_k} of {num_experts} experts, which cannot be"
        )
    return num_experts, top_k


def _by_region(entries: Iterable[TensorEntry], num_layers: int) -> dict[Region, list[TensorEntry]]:
    regions: dict[Region, list[TensorEntry]] = defaultdict(list)
    for entry in entries:
        regions[region_of(entry.key, num_layers)].append(entry)
    return regions


def _without_tied_head(backbone: list[TensorEntry], config: TextConfig) -> list[TensorEntry]:
    """A head that is tied to the embedding takes no memory of its own, even where a file holds it again."""
    if not config.values.get("tie_word_embeddings"):
        return backbone
    return [entry for entry in backbone if not entry.key.endswith("lm_head.weight")]


def _notes(mtp: list[TensorEntry], unused_bytes: int) -> tuple[str, ...]:
    skipped = sum(entry.num_bytes for entry in mtp) + unused_bytes
    return (f"multi-token-prediction layers are not loaded ({skipped} bytes)",) if skipped else ()


def tensor_group(entries: Iterable[TensorEntry]) -> TensorGroup:
    """The weights of `entries`, together."""
    elements = other = largest = 0
    for entry in entries:
        if _is_scale(entry):
            continue
        if entry.dtype.startswith(("F", "BF")):
            elements += entry.num_bytes // DTYPE_BYTES[entry.dtype]
        else:
            other += entry.num_bytes
        largest = max(largest, entry.num_bytes)
    return TensorGroup(elements, other, largest)


def _is_scale(entry: TensorEntry) -> bool:
    """Scales go when the weights beside them are dequantised."""
    return entry.dtype == "F8_E8M0" or entry.key.endswith("_scale_inv")


def _dtype(whole: dict[str, Any], config: TextConfig, backbone: list[TensorEntry]) -> Dtype:
    """What config.json says (for the whole model before its language part, as transformers reads it), else
    what most of the backbone's bytes are."""
    for values in (whole, config.values):
        said = values.get("dtype") or values.get("torch_dtype")
        for dtype in ITEMSIZE:
            if said == dtype:
                return dtype
    counted: Counter[Dtype] = Counter()
    for entry in backbone:
        if entry.dtype in _DTYPES:
            counted[_DTYPES[entry.dtype]] += entry.num_bytes
    return counted.most_common(1)[0][0] if counted else "float32"


def _dense_width(config: TextConfig) -> int:
    shared = config.optional("n_shared_experts", "num_shared_experts") or 0
    width = config.optional("moe_intermediate_size", "intermediate_size") or 0
    named = config.optional("intermediate_size") or 0, config.optional("shared_expert_intermediate_size") or 0
    return max(*named, shared * width)


def _attention(config: TextConfig, backbone: list[TensorEntry]) -> AttentionGeometry:
    heads = config.integer("num_attention_heads")
    if config.optional("kv_lora_rank") is not None:
        key = config.integer("qk_nope_head_dim") + config.integer("qk_rope_head_dim")
        token_elements = heads * 2 * (key + config.integer("v_head_dim"))
    else:
        token_elements = heads * 4 * head_size(config)
    is_eager = any(entry.key.endswith(("sinks", "attn_sink")) for entry in backbone)
    return AttentionGeometry(heads, token_elements, is_eager)
