"""Checkpoints of any size in no space: real config.json, real headers, data that is a hole in the file.

Enough for whatever reads headers only. The 60 GB of Qwen3-30B-A3B take a few megabytes of disk.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hetero_runtime.checkpoint.safetensors_file import DTYPE_BYTES

Tensors = dict[str, tuple[str, tuple[int, ...]]]
"""Name -> (safetensors dtype, shape)."""

QWEN3_30B: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "torch_dtype": "bfloat16",
    "num_hidden_layers": 48,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
}
SMALL: dict[str, Any] = {
    **QWEN3_30B,
    "num_hidden_layers": 4,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 1000,
    "max_position_embeddings": 2048,
}


def qwen3_tensors(config: Mapping[str, Any], dtype: str = "BF16") -> Tensors:
    """All tensors of a Qwen3-MoE model, one tensor an expert and projection."""
    hidden, inner, heads = config["hidden_size"], config["moe_intermediate_size"], config["head_dim"]
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (config["vocab_size"], hidden),
    }
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        queries, keys = config["num_attention_heads"] * heads, config["num_key_value_heads"] * heads
        shapes[f"{prefix}.self_attn.q_proj.weight"] = (queries, hidden)
        shapes[f"{prefix}.self_attn.k_proj.weight"] = (keys, hidden)
        shapes[f"{prefix}.self_attn.v_proj.weight"] = (keys, hidden)
        shapes[f"{prefix}.self_attn.o_proj.weight"] = (hidden, queries)
        shapes[f"{prefix}.mlp.gate.weight"] = (config["num_experts"], hidden)
        for expert in range(config["num_experts"]):
            shapes[f"{prefix}.mlp.experts.{expert}.gate_proj.weight"] = (inner, hidden)
            shapes[f"{prefix}.mlp.experts.{expert}.up_proj.weight"] = (inner, hidden)
            shapes[f"{prefix}.mlp.experts.{expert}.down_proj.weight"] = (hidden, inner)
    return {name: (dtype, shape) for name, shape in shapes.items()}


def write_shard(path: Path, tensors: Tensors) -> None:
    """One safetensors file whose data is a hole."""
    header, end = {}, 0
    for name, (dtype, shape) in tensors.items():
        begin, end = end, end + math.prod(shape) * DTYPE_BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


def write_checkpoint(folder: Path, config: Mapping[str, Any], tensors: Tensors, *, shards: int = 1) -> Path:
    """A model folder; with more than one shard, an index as well."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    names = list(tensors)
    if shards == 1:
        write_shard(folder / "model.safetensors", tensors)
        return folder
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        chosen = names[shard * len(names) // shards : (shard + 1) * len(names) // shards]
        write_shard(folder / file, {name: tensors[name] for name in chosen})
        weight_map |= dict.fromkeys(chosen, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def write_qwen3(folder: Path, config: Mapping[str, Any] = SMALL, *, shards: int = 1) -> Path:
    """A Qwen3-MoE folder of the given geometry."""
    return write_checkpoint(folder, config, qwen3_tensors(config), shards=shards)
