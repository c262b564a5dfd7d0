"""The shape of a block drafter, from the config.json of its checkpoint.

The layout is DFlash's (Chen et al., 2026; checkpoints `z-lab/*-DFlash*`): a Qwen3-like config, with

    block_size                       tokens of a block: one that is known, and the drafted ones
    dflash_config.target_layer_ids   layers of the target whose outputs it reads
    dflash_config.mask_token_id      stands where a token is to be drafted
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetero_runtime.checkpoint.checkpoint import CONFIG_NAME
from hetero_runtime.errors import CheckpointError
from hetero_runtime.plan.kv import head_size, layer_kinds
from hetero_runtime.plan.model_config import TextConfig
from hetero_runtime.prediction.fingerprint import config_sha256

ARCHITECTURE = "DFlashDraftModel"
TARGET_SHA256 = "target_config_sha256"
"""Key of the hash of the target's config.json; checkpoints of others do not have it."""
_DFLASH_KEYS = {"mask_token_id", "target_layer_ids", "block_size"}


@dataclass(frozen=True)
class BlockShape:
    """Sizes of the network, and what it expects of its target."""

    hidden: int
    """Also the target's: the drafter reads its hidden states and uses its embeddings and output head."""
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    windows: tuple[int | None, ...]
    """By layer: positions that attention reaches back; None: all."""
    is_causal: tuple[bool, ...]
    """By layer: whether tokens of a block are blind for those after them."""
    block: int
    target_layers: tuple[int, ...]
    """Numbered from 0; what is read is what these layers put out."""
    num_target_layers: int
    mask_token: int
    rope_theta: float
    norm_eps: float
    context: int
    """Positions at most."""
    target_sha256: str | None = None
    """Of the config.json of the model that it was trained for, where that is known."""

    @property
    def num_layers(self) -> int:
        """Layers of the drafter."""
        return len(self.windows)


def read_shape(folder: Path, config: Mapping[str, Any]) -> BlockShape:
    """The shape that `config`, the config.json in `folder`, describes. Raises CheckpointError for another
    architecture, a value that is missing, and what this version does not know."""
    text, own = TextConfig.of(folder / CONFIG_NAME, config), config.get("dflash_config") or {}
    if config.get("architectures") != [ARCHITECTURE]:
        raise CheckpointError(
            f"{text.file}: architectures is {config.get('architectures')}, and a block drafter is a "
            f"{ARCHITECTURE}; take such a checkpoint, or speculation.drafter: autoregressive"
        )
    _refuse_unknown(text, own)
    num_layers = text.integer("num_hidden_layers")
    kinds = layer_kinds(text, num_layers, text.optional("sliding_window"))
    is_sliding = [kind == "sliding_attention" for kind in kinds]
    causal = config.get("is_causal")
    num_targets = text.integer("num_target_layers")
    theirs = TextConfig(text.file, {**config, **own})
    return BlockShape(
        hidden=text.integer("hidden_size"),
        intermediate=text.integer("intermediate_size"),
        heads=text.integer("num_attention_heads"),
        kv_heads=text.integer("num_key_value_heads"),
        head_dim=head_size(text),
        windows=tuple(text.integer("sliding_window") if slides else None for slides in is_sliding),
        is_causal=tuple(slides if causal is None else bool(causal) for slides in is_sliding),
        block=theirs.integer("block_size"),
        target_layers=_target_layers(text, own.get("target_layer_ids"), num_layers, num_targets),
        num_target_layers=num_targets,
        mask_token=theirs.integer("mask_token_id"),
        rope_theta=_rope_theta(text),
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        context=text.integer("max_position_embeddings"),
        target_sha256=config.get(TARGET_SHA256),
    )


def check_target(shape: BlockShape, folder: Path, target: Path, *, text: Any) -> None:
    """Raise CheckpointError unless the drafter in `folder` can serve the model in `target`, whose text
    configuration is `text`."""
    differing = {
        "layers": (shape.num_target_layers, text.num_hidden_layers),
        "hidden size": (shape.hidden, text.hidden_size),
        "words": (max(text.vocab_size, shape.mask_token + 1), text.vocab_size),
    }
    if shape.target_sha256 is not None:
        differing["config.json"] = (shape.target_sha256[:12], config_sha256(target)[:12])
    for name, (wanted, found) in differing.items():
        if wanted != found:
            raise CheckpointError(
                f"{folder}: was made for another model than {target}: its {name} {wanted}, this one's "
                f"{found}; take this model's own drafter, or write speculation.drafter: prompt_lookup"
            )


def as_config(shape: BlockShape, *, vocab_size: int) -> dict[str, Any]:
    """The config.json that `read_shape` reads back. `vocab_size`: of the target."""
    is_sliding = [window is not None for window in shape.windows]
    assert list(shape.is_causal) == is_sliding, "config.json has one word for all layers"
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "qwen3",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "rms_norm_eps": shape.norm_eps,
        "rope_theta": shape.rope_theta,
        "max_position_embeddings": shape.context,
        "layer_types": ["sliding_attention" if slides else "full_attention" for slides in is_sliding],
        "sliding_window": next((window for window in shape.windows if window is not None), None),
        "vocab_size": vocab_size,
        "block_size": shape.block,
        "num_target_layers": shape.num_target_layers,
        "dflash_config": {
            "mask_token_id": shape.mask_token,
            "target_layer_ids": list(shape.target_layers),
        },
        TARGET_SHA256: shape.target_sha256,
    }


def _refuse_unknown(text: TextConfig, own: Mapping[str, Any]) -> None:
    """Raise CheckpointError for what would change the network and is not computed here."""
    values = text.values
    rope = values.get("rope_parameters") or values.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    unknown = [f"dflash_config.{key}" for key in sorted(set(own) - _DFLASH_KEYS)]
    if kind != "default":
        unknown.append(f"rope type {kind}")
    if values.get("attention_bias"):
        unknown.append("attention_bias: true")
    if values.get("hidden_act", "silu") != "silu":
        unknown.append(f"hidden_act: {values['hidden_act']}")
    if unknown:
        raise CheckpointError(
            f"{text.file}: {', '.join(unknown)} is not in this version of the block drafter; take another "
            "checkpoint, or speculation.drafter: prompt_lookup"
        )


def _target_layers(text: TextConfig, given: object, num_layers: int, num_targets: int) -> tuple[int, ...]:
    """What is `given`; else as many as the drafter has layers, evenly from the second to the fourth last."""
    if given is None:
        if num_layers == 1:
            return (num_targets // 2,)
        step = (num_targets - 4) / (num_layers - 1)
        return tuple(round(1 + index * step) for index in range(num_layers))
    if not isinstance(given, list) or not all(
        type(layer) is int and 0 <= layer < num_targets for layer in given
    ):
        raise CheckpointError(
            f"{text.file}: dflash_config.target_layer_ids is {given!r}; it must list layers from 0 to "
            f"{num_targets - 1}"
        )
    return tuple(given)


def _rope_theta(text: TextConfig) -> float:
    rope = text.values.get("rope_parameters") or {}
    theta = rope.get("rope_theta", text.values.get("rope_theta"))
    if not isinstance(theta, int | float) or theta <= 0:
        raise CheckpointError(f"{text.file}: rope_theta is {theta!r}; it must be a number over 0")
    return float(theta)
