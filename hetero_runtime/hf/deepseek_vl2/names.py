"""Tensor names of published DeepSeek-VL2 checkpoints as transformers' loader is told about them.

    vision.blocks.7.attn.qkv.weight      timm's names of a vision transformer     to SiglipVisionModel's
    language.model.layers.3.mlp...       already transformers'
    projector.layers.0, image_newline    already ours
    view_seperator                       spelt otherwise

The pooling of the vision part (`vision.attn_pool`) is in the files and used by nobody.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)
from transformers.core_model_loading import Chunk, ConversionOps, WeightConverter, WeightRenaming

UNUSED = (r"^vision\.attn_pool\.",)
"""Patterns of tensors that the model has no use for."""

_BLOCK = r"^vision\.blocks\.(\d+)\."
_LAYER = r"vision.encoder.layers.\1."


class DropFirstAxis(ConversionOps):
    """`[1, ...]` to `[...]`: timm keeps an axis for the batch on its positions."""

    @torch.no_grad()
    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **_: Any
    ) -> dict[str, Any]:
        (tensors,) = input_dict.values()
        tensor = tensors[0] if isinstance(tensors, list) else tensors
        return {target_patterns[0]: tensor.squeeze(0)}


def register_names(class_name: str, *, like_deepseek_v2: str) -> None:
    """Tell transformers' loader about the names. `class_name`: of the whole model; `like_deepseek_v2`: of our
    own language class, whose experts are stored as DeepSeek-V2's."""
    experts = get_checkpoint_conversion_mapping("deepseek_v2")
    register_checkpoint_conversion_mapping(class_name, _names(), overwrite=True)
    register_checkpoint_conversion_mapping(like_deepseek_v2, experts, overwrite=True)


def _names() -> list[Any]:
    renamings = {
        _BLOCK + r"norm1\.": _LAYER + "layer_norm1.",
        _BLOCK + r"norm2\.": _LAYER + "layer_norm2.",
        _BLOCK + r"mlp\.": _LAYER + "mlp.",
        _BLOCK + r"attn\.proj\.": _LAYER + "self_attn.out_proj.",
        _BLOCK + r"attn\.qkv\.": _LAYER + "self_attn.qkv.",
        r"^vision\.patch_embed\.proj\.": "vision.embeddings.patch_embedding.",
        r"^vision\.norm\.": "vision.post_layernorm.",
        "^view_seperator": "view_separator",
    }
    qkv = [f"self_attn.{part}_proj" for part in "qkv"]
    return [
        *[WeightRenaming(source, target) for source, target in renamings.items()],
        WeightConverter("self_attn.qkv", qkv, [Chunk(dim=0)]),
        WeightConverter("vision.pos_embed", "vision.embeddings.position_embedding.weight", [DropFirstAxis()]),
    ]
