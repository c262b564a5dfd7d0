"""Rewrite a tiny float checkpoint the way published quantised ones are laid out on disk.

block-fp8   X.weight float8_e4m3fn [N, K], X.weight_scale_inv float32 [ceil(N/B), ceil(K/B)]
MXFP4       X_blocks uint8 [E, N, K/32, 16] (two e2m1 values a byte, low nibble first),
            X_scales uint8 [E, N, K/32] (power of two, biased by 127)
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]

FP8_MAX = 448.0
FP4_VALUES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
FP4_GROUP = 32
_NOT_FP8 = re.compile(r"embed_tokens|lm_head|norm|mlp\.gate\.weight")


def quantize_fp8(folder: Path, *, block: int) -> None:
    """Rewrite the linear weights of `folder` in blocks of `block` × `block`; the last may be smaller.

    transformers' own dequantisation takes the block size from the shape of the scales and is right only
    when the blocks are even. Where one is ragged, the same weights are written, dequantised, into
    `folder/dequantized`, for the reference model to read.
    """
    is_ragged = False

    def rewrite(tensors: Tensors) -> tuple[Tensors, Tensors]:
        nonlocal is_ragged
        quantized: Tensors = {}
        plain: Tensors = {}
        for name, tensor in tensors.items():
            if tensor.dim() != 2 or _NOT_FP8.search(name):
                quantized[name] = plain[name] = tensor
                continue
            weight, scale = _fp8_blocks(tensor, block)
            is_ragged = is_ragged or any(size % block for size in tensor.shape)
            quantized[name], quantized[f"{name}_scale_inv"] = weight, scale
            plain[name] = weight.float() * _spread(scale, block, tensor.shape)
        return quantized, plain

    settings = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [block, block],
        "modules_to_not_convert": ["lm_head"],
    }
    plain = _rewrite_folder(folder, settings, rewrite)
    if is_ragged:
        _save_plain(folder, plain)


def quantize_mxfp4(folder: Path) -> None:
    """Rewrite the experts of a gpt-oss folder (`[E, K, N]` on disk) as MXFP4 blocks and scales."""

    def rewrite(tensors: Tensors) -> tuple[Tensors, Tensors]:
        quantized: Tensors = {}
        for name, tensor in tensors.items():
            if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
                quantized[f"{name}_blocks"], quantized[f"{name}_scales"] = _fp4_groups(tensor.transpose(1, 2))
            else:
                quantized[name] = tensor
        return quantized, {}

    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    _rewrite_folder(folder, {"quant_method": "mxfp4", "modules_to_not_convert": kept}, rewrite)


def _fp8_blocks(weight: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    rows, columns = weight.shape
    padded = torch.nn.functional.pad(weight.float(), (0, -columns % block, 0, -rows % block))
    tiles = padded.view(padded.shape[0] // block, block, padded.shape[1] // block, block)
    scale = tiles.abs().amax((1, 3)) / FP8_MAX  # [row blocks, column blocks]
    quantized = (weight.float() / _spread(scale, block, weight.shape)).to(torch.float8_e4m3fn)
    return quantized, scale


def _spread(scale: torch.Tensor, block: int, shape: torch.Size) -> torch.Tensor:
    """One scale a block -> one a weight, cut to `shape` [N, K]."""
    return scale.repeat_interleave(block, 0).repeat_interleave(block, 1)[: shape[0], : shape[1]]


def _fp4_groups(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    experts, rows, columns = weight.shape
    groups = weight.float().reshape(experts, rows, columns // FP4_GROUP, FP4_GROUP)
    exponent = groups.abs().amax(-1).clamp_min(1e-9).log2().floor() - 2  # 6 = 1.5 · 2² is the largest value
    scaled = groups / exponent.exp2()[..., None]
    code = (scaled[..., None] - FP4_VALUES).abs().argmin(-1).to(torch.uint8)
    return code[..., 0::2] | (code[..., 1::2] << 4), (exponent + 127).to(torch.uint8)


def _rewrite_folder(
    folder: Path, settings: dict[str, Any], rewrite: Callable[[Tensors], tuple[Tensors, Tensors]]
) -> Tensors:
    """Replace the one safetensors file of `folder` and name the format in config.json."""
    file = folder / "model.safetensors"
    quantized, plain = rewrite(load_file(file))
    save_file({name: tensor.contiguous() for name, tensor in quantized.items()}, file, {"format": "pt"})
    config_file = folder / "config.json"
    config = json.loads(config_file.read_text(encoding="utf-8"))
    config["quantization_config"] = settings
    config_file.write_text(json.dumps(config, indent=2), encoding="utf-8")
    return plain


def _save_plain(folder: Path, tensors: Tensors) -> None:
    plain = folder / "dequantized"
    plain.mkdir()
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    del config["quantization_config"]
    (plain / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    save_file(
        {name: t.contiguous() for name, t in tensors.items()}, plain / "model.safetensors", {"format": "pt"}
    )
