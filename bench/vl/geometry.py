"""The geometry of the small vision-language model."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from tokenizers import Tokenizer
from transformers import Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration

from bench.models import chat
from bench.models.corpus import SEPARATOR
from bench.models.model import ROUTER_BALANCE
from bench.models.tokenizer import PAD
from bench.vl.drawing import CELL, GRID
from bench.vl.text import IMAGE, VIDEO, VISION_END, VISION_START, VOCAB_SIZE

MERGE = 2
PATCH = CELL // MERGE
PATCH_GRID = MERGE * GRID


@dataclass(frozen=True)
class Geometry:
    """Sizes. The default: about 18 M parameters, 34 MiB in bf16."""

    hidden: int = 256
    layers: int = 10
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 32
    experts: int = 64
    top_k: int = 4
    intermediate: int = 24
    """Inner width of one expert; a multiple of 8, as grouped matrix products need 16-byte rows."""
    vision_hidden: int = 192
    vision_layers: int = 6
    vision_heads: int = 6
    vision_intermediate: int = 384
    deepstack: tuple[int, ...] = (1, 3)
    """Vision layers whose features are added again to the first language layers, in order."""
    max_length: int = 1024


def model_config(geometry: Geometry, tokenizer: Tokenizer) -> Qwen3VLMoeConfig:
    """The transformers configuration, its special tokens those of `tokenizer`."""
    token = tokenizer.token_to_id
    third = geometry.head_dim // 6
    rope = {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [geometry.head_dim // 2 - 2 * third, third, third],
        "mrope_interleaved": True,
    }
    text = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": geometry.hidden,
        "num_hidden_layers": geometry.layers,
        "num_attention_heads": geometry.heads,
        "num_key_value_heads": geometry.kv_heads,
        "head_dim": geometry.head_dim,
        "num_experts": geometry.experts,
        "num_experts_per_tok": geometry.top_k,
        "moe_intermediate_size": geometry.intermediate,
        "intermediate_size": geometry.intermediate * geometry.top_k,
        "max_position_embeddings": geometry.max_length,
        "rope_parameters": rope,
        "router_aux_loss_coef": ROUTER_BALANCE,
        "tie_word_embeddings": True,
        "bos_token_id": token(SEPARATOR),
        "eos_token_id": token(chat.END),
        "pad_token_id": token(PAD),
    }
    vision = {
        "depth": geometry.vision_layers,
        "hidden_size": geometry.vision_hidden,
        "intermediate_size": geometry.vision_intermediate,
        "num_heads": geometry.vision_heads,
        "out_hidden_size": geometry.hidden,
        "patch_size": PATCH,
        "spatial_merge_size": MERGE,
        "temporal_patch_size": 2,
        "deepstack_visual_indexes": list(geometry.deepstack),
        "num_position_embeddings": PATCH_GRID**2,
    }
    return Qwen3VLMoeConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=token(IMAGE),
        video_token_id=token(VIDEO),
        vision_start_token_id=token(VISION_START),
        vision_end_token_id=token(VISION_END),
        tie_word_embeddings=True,
    )


def build_model(
    geometry: Geometry, tokenizer: Tokenizer, device: torch.device
) -> Qwen3VLMoeForConditionalGeneration:
    """A freshly initialised model in float32 on `device`."""
    with device:
        return Qwen3VLMoeForConditionalGeneration(model_config(geometry, tokenizer))
