"""Tiny random DeepSeek-VL2 checkpoints, with the names, shapes and files of the published ones.

    folder = build_deepseek_vl2("small", tmp_path)

Written from names alone, without the model under test. A tile is 28 x 28 pixels: 7 x 7 patches, an odd number
as in the published models (27 x 27), 4 x 4 tokens.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests import tiny_tokenizer

TILE = 28
SIDE = 4
"""Tokens of one side of a tile."""
RESOLUTIONS = [[TILE * columns, TILE * rows] for columns in (1, 2, 3) for rows in (1, 2, 3)]
VARIANTS = ("tiny", "small", "large")
IMAGE = tiny_tokenizer.VOCAB_SIZE
"""The first token that the published processor adds to a tokenizer."""
NUM_ADDED = 8

_HIDDEN, _LAYERS, _EXPERTS, _HEADS, _WIDTH = 64, 3, 16, 4, 32
_MLP = int(_WIDTH * 3.7362)
_LATENT = {
    "kv_lora_rank": 16,
    "q_lora_rank": None,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
_LANGUAGE: dict[str, dict[str, Any]] = {
    # multi-head attention
    "tiny": {
        "use_mla": False,
        "kv_lora_rank": None,
        "q_lora_rank": None,
        "qk_nope_head_dim": 0,
        "qk_rope_head_dim": 0,
        "v_head_dim": 0,
        "topk_method": "greedy",
    },
    # latent attention, experts by softmax
    "small": {**_LATENT, "topk_method": "greedy"},
    # latent attention, experts by sigmoid with a correction bias
    "large": {
        **_LATENT,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.0,
    },
}
_SHAPE: dict[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV2Config"},
    "bos_token_id": tiny_tokenizer.BEGIN,
    "eos_token_id": tiny_tokenizer.END,
    "first_k_dense_replace": 1,
    "hidden_size": _HIDDEN,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
    "moe_intermediate_size": 32,
    "n_group": 1,
    "n_routed_experts": _EXPERTS,
    "n_shared_experts": 2,
    "num_attention_heads": _HEADS,
    "num_experts_per_tok": 4,
    "num_hidden_layers": _LAYERS,
    "num_key_value_heads": _HEADS,
    "rm_head": False,
    "lm_head": True,
    "topk_group": 1,
    "torch_dtype": "bfloat16",
    "vocab_size": tiny_tokenizer.VOCAB_SIZE + NUM_ADDED,
}


def published_config(variant: str) -> dict[str, Any]:
    """config.json, with the keys of the published ones (which name no architecture)."""
    return {
        "candidate_resolutions": RESOLUTIONS,
        "global_view_pos": "head",
        "language_config": _SHAPE | _LANGUAGE[variant],
        "model_type": "deepseek_vl_v2",
        "projector_config": {"input_dim": _WIDTH, "model_type": "mlp_projector", "n_embed": _HIDDEN},
        "tile_tag": "2D",
        "vision_config": {
            "heads": 2,
            "image_size": TILE,
            "layers": 2,
            "mlp_ratio": 3.7362,
            "model_type": "vision",
            "patch_size": 4,
            "width": _WIDTH,
        },
    }


def build_deepseek_vl2(
    variant: str, folder: Path, *, dtype: torch.dtype = torch.float32, seed: int = 0
) -> Path:
    """Write the checkpoint `variant`, one of VARIANTS, into `folder` and return it. The same arguments give
    the same bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    random = torch.Generator().manual_seed(seed)
    tensors = {name: _draw(name, shape, random).to(dtype) for name, shape in _shapes(variant)}
    config = published_config(variant) | {"torch_dtype": str(dtype).removeprefix("torch.")}
    processor = {
        "candidate_resolutions": RESOLUTIONS,
        "downsample_ratio": 2,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "image_token": "<image>",
        "normalize": True,
        "patch_size": 4,
        "processor_class": "DeepseekVLV2Processor",
        "sft_format": "deepseek",
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "processor_config.json").write_text(json.dumps(processor))
    tiny_tokenizer.save_tokenizer(folder)
    (folder / "chat_template.jinja").unlink()
    return folder


def _draw(name: str, shape: tuple[int, ...], random: torch.Generator) -> torch.Tensor:
    """Weights with which a model behaves: see `tests.architectures`."""
    noise = torch.randn(shape, generator=random)
    if name.endswith("norm.weight") or (".norm" in name and name.endswith("weight")):
        return 1 + 0.1 * noise
    if name.endswith("lm_head.weight"):
        drawn = 0.4 * noise
        drawn[: len(tiny_tokenizer.SPECIAL_TOKENS)] = 0  # so that greedy text does not end by chance
        drawn[tiny_tokenizer.VOCAB_SIZE :] = 0
        return drawn
    if len(shape) == 1:
        return 0.3 * noise
    if name.endswith(("embed_tokens.weight", "pos_embed")):
        return noise
    return 1.6 / math.sqrt(math.prod(shape[1:])) * noise


def _shapes(variant: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield from _vision_shapes()
    yield from _linear("projector.layers.0", _WIDTH * 4, _HIDDEN)
    yield from _linear("projector.layers.2", _HIDDEN, _HIDDEN)
    yield "image_newline", (_HIDDEN,)
    yield "view_seperator", (_HIDDEN,)
    vocab = _SHAPE["vocab_size"]
    yield "language.model.embed_tokens.weight", (vocab, _HIDDEN)
    yield "language.model.norm.weight", (_HIDDEN,)
    yield "language.lm_head.weight", (vocab, _HIDDEN)
    for layer in range(_LAYERS):
        name = f"language.model.layers.{layer}"
        yield f"{name}.input_layernorm.weight", (_HIDDEN,)
        yield f"{name}.post_attention_layernorm.weight", (_HIDDEN,)
        yield from _attention_shapes(f"{name}.self_attn", is_latent=variant != "tiny")
        if layer == 0:
            yield from _mlp_shapes(f"{name}.mlp", 96)
            continue
        yield f"{name}.mlp.gate.weight", (_EXPERTS, _HIDDEN)
        if variant == "large":
            yield f"{name}.mlp.gate.e_score_correction_bias", (_EXPERTS,)
        yield from _mlp_shapes(f"{name}.mlp.shared_experts", 64)
        for expert in range(_EXPERTS):
            yield from _mlp_shapes(f"{name}.mlp.experts.{expert}", 32)


def _vision_shapes() -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names of timm's vision transformer, the pooling that nobody uses included."""
    yield "vision.patch_embed.proj.weight", (_WIDTH, 3, 4, 4)
    yield "vision.patch_embed.proj.bias", (_WIDTH,)
    yield "vision.pos_embed", (1, 49, _WIDTH)
    for block in ("vision.blocks.0", "vision.blocks.1"):
        for norm in ("norm1", "norm2"):
            yield f"{block}.{norm}.weight", (_WIDTH,)
            yield f"{block}.{norm}.bias", (_WIDTH,)
        yield from _linear(f"{block}.attn.qkv", _WIDTH, 3 * _WIDTH)
        yield from _linear(f"{block}.attn.proj", _WIDTH, _WIDTH)
        yield from _linear(f"{block}.mlp.fc1", _WIDTH, _MLP)
        yield from _linear(f"{block}.mlp.fc2", _MLP, _WIDTH)
    yield "vision.norm.weight", (_WIDTH,)
    yield "vision.norm.bias", (_WIDTH,)
    yield "vision.attn_pool.latent", (1, 1, _WIDTH)
    yield from _linear("vision.attn_pool.kv", _WIDTH, 2 * _WIDTH)


def _attention_shapes(name: str, *, is_latent: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    if not is_latent:
        yield from ((f"{name}.{part}_proj.weight", (_HIDDEN, _HIDDEN)) for part in "qkvo")
        return
    yield f"{name}.q_proj.weight", (_HEADS * 24, _HIDDEN)
    yield f"{name}.kv_a_proj_with_mqa.weight", (16 + 8, _HIDDEN)
    yield f"{name}.kv_a_layernorm.weight", (16,)
    yield f"{name}.kv_b_proj.weight", (_HEADS * 32, 16)
    yield f"{name}.o_proj.weight", (_HIDDEN, _HEADS * 16)


def _mlp_shapes(name: str, width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.gate_proj.weight", (width, _HIDDEN)
    yield f"{name}.up_proj.weight", (width, _HIDDEN)
    yield f"{name}.down_proj.weight", (_HIDDEN, width)


def _linear(name: str, size: int, following: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.weight", (following, size)
    yield f"{name}.bias", (following,)
