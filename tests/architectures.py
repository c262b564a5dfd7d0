"""One tiny random checkpoint for each covered architecture, on disk as a real one would be.

    folder = build_checkpoint("Qwen3Moe", tmp_path)
    model = reference_model(folder)          # plain transformers, all experts resident, float32

Random weights are drawn so that the models behave: routers and their correction biases differ between
experts, logits differ between tokens, and greedy text is not one token repeated. Each architecture has
one trait that a loader can get wrong; it stands beside the name in `_CONFIGS`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image

from tests import tiny_tokenizer
from tests.quantized_checkpoints import quantize_fp8, quantize_mxfp4

transformers.logging.disable_progress_bar()

_SHAPE: dict[str, Any] = {
    "vocab_size": tiny_tokenizer.VOCAB_SIZE,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "pad_token_id": tiny_tokenizer.PAD,
    "bos_token_id": tiny_tokenizer.BEGIN,
    "eos_token_id": tiny_tokenizer.END,
    "tie_word_embeddings": False,
}
_GROUPED_HEADS: dict[str, Any] = {"num_key_value_heads": 2, "head_dim": 16}
_LATENT_HEADS: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
_LINEAR_HEADS: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
_EXPERTS: dict[str, Any] = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 32}
_ROUTED: dict[str, Any] = {
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 32,
    "intermediate_size": 96,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
_LOCAL: dict[str, Any] = {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 32}


def _config(name: str, *parts: dict[str, Any], **own: Any) -> Callable[..., transformers.PretrainedConfig]:
    fields: dict[str, Any] = dict(_SHAPE)
    for part in (*parts, own):
        fields.update(part)
    return lambda **changes: getattr(transformers, f"{name}Config")(**fields | changes)


def _qwen3_vl_config() -> transformers.PretrainedConfig:
    rope = {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [4, 2, 2],
        "mrope_interleaved": True,
    }
    return transformers.Qwen3VLMoeConfig(
        text_config=_SHAPE | _GROUPED_HEADS | _EXPERTS | {"intermediate_size": 96, "rope_parameters": rope},
        vision_config={
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_heads": 2,
            "out_hidden_size": 64,
            "deepstack_visual_indexes": [0, 1],
            "num_position_embeddings": 64,
        },
        image_token_id=tiny_tokenizer.IMAGE,
        video_token_id=tiny_tokenizer.VIDEO,
        vision_start_token_id=tiny_tokenizer.VISION_START,
        vision_end_token_id=tiny_tokenizer.VISION_END,
        tie_word_embeddings=False,
    )


_QWEN3 = _config("Qwen3Moe", _GROUPED_HEADS, _EXPERTS, intermediate_size=96, norm_topk_prob=True)
_CONFIGS: dict[str, Callable[..., transformers.PretrainedConfig]] = {
    # top-k weights not renormalised
    "Olmoe": _config(
        "Olmoe", num_experts=16, num_experts_per_tok=4, intermediate_size=32, num_key_value_heads=2
    ),
    # a gated shared expert, and a dense layer between MoE layers
    "Qwen2Moe": _config(
        "Qwen2Moe",
        _EXPERTS,
        num_key_value_heads=2,
        intermediate_size=96,
        shared_expert_intermediate_size=48,
        mlp_only_layers=[1],
    ),
    # several shards
    "Qwen3Moe": _QWEN3,
    # linear attention: state instead of keys and values
    "Qwen3Next": _config(
        "Qwen3Next",
        _GROUPED_HEADS,
        _EXPERTS,
        _LINEAR_HEADS,
        intermediate_size=96,
        shared_expert_intermediate_size=48,
    ),
    # the same from a text-only config of a model that also comes with images
    "Qwen3_5Moe": _config(
        "Qwen3_5MoeText", _GROUPED_HEADS, _EXPERTS, _LINEAR_HEADS, shared_expert_intermediate_size=48
    ),
    # expert groups by their best expert; the first layer is dense
    "DeepseekV2": _config(
        "DeepseekV2",
        _LATENT_HEADS,
        _ROUTED,
        topk_method="group_limited_greedy",
        n_group=4,
        topk_group=2,
        routed_scaling_factor=1.5,
    ),
    # expert groups by their best two, sigmoid scores, a correction bias for the choice only
    "DeepseekV3": _config(
        "DeepseekV3",
        _LATENT_HEADS,
        _ROUTED,
        n_group=4,
        topk_group=2,
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
    ),
    # Moonlight-16B-A3B: DeepseekV3 without groups and without a low-rank query
    "Moonlight": _config(
        "DeepseekV3",
        _LATENT_HEADS | {"q_lora_rank": None},
        _ROUTED | {"n_shared_experts": 2},
        n_group=1,
        topk_group=1,
        norm_topk_prob=True,
        routed_scaling_factor=2.446,
    ),
    # expert biases, transposed weights, gate and up interleaved, attention sinks, a short window
    "GptOss": _config("GptOss", _GROUPED_HEADS, _LOCAL, sliding_window=8),
    # the oldest names: w1, w2, w3; several shards
    "Mixtral": _config("Mixtral", _GROUPED_HEADS, _LOCAL),
    # a dense first layer, and a correction bias
    "Glm4Moe": _config("Glm4Moe", _GROUPED_HEADS, _ROUTED, n_group=1, topk_group=1, norm_topk_prob=True),
    # the correction bias belongs to the block, not to the router
    "MiniMaxM2": _config("MiniMaxM2", _GROUPED_HEADS, _LOCAL),
    # images, experts fused on disk, three-dimensional positions, visual features added at several layers
    "Qwen3VLMoe": _qwen3_vl_config,
    # the first layer chooses experts by token id; each layer has its own kind of attention
    "DeepseekV4": _config(
        "DeepseekV4",
        n_routed_experts=16,
        num_experts_per_tok=4,
        moe_intermediate_size=32,
        mlp_layer_types=["hash_moe", "moe", "moe"],
        layer_types=["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
        compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 16},
        index_topk=4,
        num_key_value_heads=1,
        head_dim=32,
        qk_rope_head_dim=16,
        q_lora_rank=32,
        o_groups=2,
        o_lora_rank=16,
        index_n_heads=2,
        index_head_dim=32,
        sliding_window=16,
    ),
    "Qwen3MoeFp8": _QWEN3,
    # 40 = 16 + 16 + 8: the last block of each expert is short
    "Qwen3MoeFp8Ragged": _config(
        "Qwen3Moe", _GROUPED_HEADS, _EXPERTS | {"moe_intermediate_size": 40}, intermediate_size=96
    ),
    "GptOssMxfp4": _config("GptOss", _GROUPED_HEADS, _LOCAL, sliding_window=8),
}
ARCHITECTURES: tuple[str, ...] = tuple(_CONFIGS)
QUANTIZED: tuple[str, ...] = ("Qwen3MoeFp8", "Qwen3MoeFp8Ragged", "GptOssMxfp4")

_SHARD_SIZE = {"Qwen3Moe": "300KB", "Mixtral": "200KB"}
_FP8_BLOCK = 16
_PIXELS = {"shortest_edge": 32 * 32, "longest_edge": 128 * 128}


def build_checkpoint(
    name: str, folder: Path, *, dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any
) -> Path:
    """Write the tiny checkpoint `name`, with its tokenizer, into `folder` and return it.

    The same arguments give the same bytes. `dtype` is that of the weights on disk; the quantised
    architectures keep their experts in their own format and the rest in `dtype`. `changes`: fields of its
    configuration that differ.
    """
    config = _CONFIGS[name](**changes)
    auto = _auto_class(config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = auto.from_config(config, dtype=torch.float32)
        _randomize(model)
    model = model.to(dtype)
    for part in (model.config, *(getattr(model.config, name) for name in model.config.sub_configs)):
        part.dtype = dtype
    model.save_pretrained(folder, max_shard_size=_SHARD_SIZE.get(name, "1GB"))
    tiny_tokenizer.save_tokenizer(folder)
    if name == "Qwen3VLMoe":
        _image_processor().save_pretrained(folder)
    elif name.startswith("Qwen3MoeFp8"):
        quantize_fp8(folder, block=_FP8_BLOCK)
    elif name == "GptOssMxfp4":
        quantize_mxfp4(folder)
    return folder


def reference_model(folder: Path, *, dtype: torch.dtype = torch.float32) -> transformers.PreTrainedModel:
    """Plain transformers: all experts resident, the eager loop over experts, weights dequantised."""
    if (folder / "dequantized").is_dir():
        folder = folder / "dequantized"
    config = transformers.AutoConfig.from_pretrained(folder)
    method = (getattr(config, "quantization_config", None) or {}).get("quant_method")
    extra: dict[str, Any] = {}
    if method == "fp8":
        extra["quantization_config"] = transformers.FineGrainedFP8Config(dequantize=True)
    elif method == "mxfp4":
        extra["quantization_config"] = transformers.Mxfp4Config(dequantize=True)
    model = _auto_class(config).from_pretrained(folder, dtype=dtype, experts_implementation="eager", **extra)
    # dequantised weights come in a dtype of their own; elsewhere, buffers in float32 have to stay so
    return (model.to(dtype) if extra else model).eval()


def prompt_ids(num_tokens: int, *, seed: int = 1) -> torch.Tensor:
    """Random text tokens `[1, num_tokens]`, without special ones."""
    generator = torch.Generator().manual_seed(seed)
    first = len(tiny_tokenizer.SPECIAL_TOKENS)
    return torch.randint(first, tiny_tokenizer.VOCAB_SIZE, (1, num_tokens), generator=generator)


def image_inputs(*, num_images: int = 1, side: int = 64, seed: int = 0) -> dict[str, torch.Tensor]:
    """What Qwen3VLMoe's forward takes for a prompt with random images between text tokens.

    Returns input_ids and attention_mask `[1, tokens]`, mm_token_type_ids (1 on image tokens),
    pixel_values `[patches, 3·2·16·16]` and image_grid_thw `[num_images, 3]`. Built from the image
    processor that works on PIL alone: the combined processor of this model needs torchvision.
    """
    noise = np.random.default_rng(seed)
    images = [
        Image.fromarray(noise.integers(0, 255, (side, side, 3), dtype=np.uint8)) for _ in range(num_images)
    ]
    pixels = _image_processor()(images=images, return_tensors="pt")
    ids = prompt_ids(3, seed=seed)[0].tolist()
    for grid in pixels["image_grid_thw"]:
        num_tokens = int(grid.prod()) // 4  # patches merge two by two
        ids += [tiny_tokenizer.VISION_START, *[tiny_tokenizer.IMAGE] * num_tokens, tiny_tokenizer.VISION_END]
    ids += prompt_ids(4, seed=seed + 1)[0].tolist()
    input_ids = torch.tensor([ids])
    return {
        "input_ids": input_ids,
        "attention_mask": torch.ones_like(input_ids),
        "mm_token_type_ids": (input_ids == tiny_tokenizer.IMAGE).int(),
        "pixel_values": pixels["pixel_values"],
        "image_grid_thw": pixels["image_grid_thw"],
    }


def _auto_class(config: transformers.PretrainedConfig) -> Any:
    is_vision_language = hasattr(config, "vision_config")
    return (
        transformers.AutoModelForImageTextToText if is_vision_language else transformers.AutoModelForCausalLM
    )


def _image_processor() -> Any:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    return Qwen2VLImageProcessorPil(patch_size=16, merge_size=2, temporal_patch_size=2, size=_PIXELS)


@torch.no_grad()
def _randomize(model: torch.nn.Module) -> None:
    """Redraw what transformers starts at or near zero (routers, biases, hash tables); widen the rest."""
    for name, parameter in model.named_parameters():
        if name.endswith("lm_head.weight"):
            parameter.normal_(0.0, 0.4)
            parameter[: len(tiny_tokenizer.SPECIAL_TOKENS)] = 0  # so that greedy text does not end by chance
        elif parameter.dim() > 1:
            std = 1.0 if name.endswith("embed_tokens.weight") else 1.6 / math.sqrt(parameter.shape[-1])
            parameter.normal_(0.0, std)
        elif name.endswith(("bias", "sinks")):
            parameter.normal_(0.0, 0.3)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.normal_(0.0, 0.3)
        elif name.endswith("tid2eid"):  # [vocab, top_k]: distinct experts for each token id
            rows, top_k = buffer.shape
            buffer.copy_(torch.rand(rows, model.config.n_routed_experts).argsort(-1)[:, :top_k])
