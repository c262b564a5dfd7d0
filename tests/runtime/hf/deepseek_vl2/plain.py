"""DeepSeek-VL2 written down plainly, from published tensors: what the model under test is held against."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional
from transformers import (
    DeepseekOcr2TextConfig,
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
)
from transformers.models.deepseek_ocr2.modeling_deepseek_ocr2 import DeepseekOcr2TextModel

Tensors = dict[str, torch.Tensor]


def vision_features(tensors: Tensors, pixels: torch.Tensor, *, heads: int) -> torch.Tensor:
    """timm's vision transformer without its pooling. `[tiles, 3, size, size]` to `[tiles, patches, width]`"""
    weight, bias = tensors["vision.patch_embed.proj.weight"], tensors["vision.patch_embed.proj.bias"]
    hidden = functional.conv2d(pixels, weight, bias, stride=weight.shape[-1]).flatten(2).transpose(1, 2)
    hidden = hidden + tensors["vision.pos_embed"]
    for block in range(2):
        part = _part(tensors, f"vision.blocks.{block}.")
        hidden = hidden + _attend(part, _norm(part, "norm1", hidden), heads)
        wide = functional.gelu(_linear(part, "mlp.fc1", _norm(part, "norm2", hidden)), approximate="tanh")
        hidden = hidden + _linear(part, "mlp.fc2", wide)
    return _norm(_part(tensors, "vision."), "norm", hidden)


def projected(tensors: Tensors, features: torch.Tensor) -> torch.Tensor:
    """Two by two patches to a token, channel by channel. `[tiles, side, side, hidden]`"""
    tiles, patches, width = features.shape
    side = round(patches**0.5)
    grid = functional.pad(features.transpose(1, 2).view(tiles, width, side, side), (0, side % 2, 0, side % 2))
    blocks = functional.unfold(grid, kernel_size=2, stride=2).transpose(1, 2)
    part = _part(tensors, "projector.layers.")
    tokens = _linear(part, "2", functional.gelu(_linear(part, "0", blocks)))
    fewer = (side + 1) // 2
    return tokens.view(tiles, fewer, fewer, -1)


def laid_out(tensors: Tensors, tiles: torch.Tensor, columns: int, rows: int) -> torch.Tensor:
    """The tokens of one image, singly. `[1 + columns * rows, side, side, hidden]` to `[tokens, hidden]`"""
    side, newline = tiles.shape[1], tensors["image_newline"]
    tokens = []
    for y in range(side):
        tokens += [*tiles[0, y], newline]
    tokens.append(tensors["view_seperator"])
    for row in range(rows):
        for y in range(side):
            for column in range(columns):
                tokens += list(tiles[1 + row * columns + column, y])
            tokens.append(newline)
    return torch.stack(tokens)


def language_logits(
    tensors: Tensors, variant: str, config: dict[str, Any], ids: torch.Tensor
) -> torch.Tensor:
    """Logits `[n, vocab]` of transformers' own class for the language part, its weights put in by hand."""
    weights = _with_experts_together(_part(tensors, "language."), config)
    own = {name: value for name, value in config.items() if name not in ("auto_map", "architectures")}
    if variant == "tiny":
        kinds = ["dense", *["sparse"] * (config["num_hidden_layers"] - 1)]
        left_out = ("use_mla", "first_k_dense_replace", "kv_lora_rank", "q_lora_rank")
        own = {name: value for name, value in own.items() if name not in left_out and "head_dim" not in name}
        body = DeepseekOcr2TextModel(DeepseekOcr2TextConfig(**own, mlp_layer_types=kinds)).eval()
        body.load_state_dict(_part(weights, "model."))
        return functional.linear(body(ids[None]).last_hidden_state[0], weights["lm_head.weight"])
    if variant == "small":
        model: Any = DeepseekV2ForCausalLM(DeepseekV2Config(**own))
    else:
        model = DeepseekV3ForCausalLM(DeepseekV3Config(**own))
    model.eval().load_state_dict(weights)
    logits: torch.Tensor = model(ids[None]).logits[0]
    return logits


def _with_experts_together(weights: Tensors, config: dict[str, Any]) -> Tensors:
    together = {name: tensor for name, tensor in weights.items() if ".mlp.experts." not in name}
    for layer in range(config["first_k_dense_replace"], config["num_hidden_layers"]):
        mlp = f"model.layers.{layer}.mlp.experts"
        each = [_part(weights, f"{mlp}.{expert}.") for expert in range(config["n_routed_experts"])]
        together[f"{mlp}.gate_up_proj"] = torch.stack(
            [torch.cat([one["gate_proj.weight"], one["up_proj.weight"]]) for one in each]
        )
        together[f"{mlp}.down_proj"] = torch.stack([one["down_proj.weight"] for one in each])
    return together


def _attend(part: Tensors, hidden: torch.Tensor, heads: int) -> torch.Tensor:
    tiles, patches, width = hidden.shape
    qkv = _linear(part, "attn.qkv", hidden).view(tiles, patches, 3, heads, width // heads)
    query, key, value = qkv.permute(2, 0, 3, 1, 4)
    scores = query @ key.transpose(2, 3) / (width // heads) ** 0.5
    mixed = (scores.softmax(-1) @ value).transpose(1, 2).reshape(tiles, patches, width)
    return _linear(part, "attn.proj", mixed)


def _norm(part: Tensors, name: str, hidden: torch.Tensor) -> torch.Tensor:
    weight, bias = part[f"{name}.weight"], part[f"{name}.bias"]
    return functional.layer_norm(hidden, hidden.shape[-1:], weight, bias, eps=1e-6)


def _linear(part: Tensors, name: str, hidden: torch.Tensor) -> torch.Tensor:
    return functional.linear(hidden, part[f"{name}.weight"], part[f"{name}.bias"])


def _part(tensors: Tensors, prefix: str) -> Tensors:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
