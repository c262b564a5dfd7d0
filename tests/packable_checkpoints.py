"""Tiny bf16 checkpoints whose records get smaller by packing: those of `architectures` are too small."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

from tests import tiny_tokenizer

_SHAPE: dict[str, Any] = {
    "vocab_size": tiny_tokenizer.VOCAB_SIZE,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "pad_token_id": tiny_tokenizer.PAD,
    "bos_token_id": tiny_tokenizer.BEGIN,
    "eos_token_id": tiny_tokenizer.END,
    "tie_word_embeddings": False,
    "dtype": torch.bfloat16,
}
_CONFIGS = {
    "Qwen3Moe": lambda: transformers.Qwen3MoeConfig(
        **_SHAPE, num_experts=16, num_experts_per_tok=4, moe_intermediate_size=256, intermediate_size=64
    ),
    "GptOss": lambda: transformers.GptOssConfig(
        **_SHAPE, num_local_experts=8, num_experts_per_tok=2, intermediate_size=192, sliding_window=8
    ),
}
"""Records of 96 and 72 KiB; GptOss has biases, and so padding, in its records."""
PACKABLE = tuple(_CONFIGS)


def build_packable(name: str, folder: Path) -> Path:
    """Write the checkpoint `name`, with its tokenizer, into `folder` and return it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(_CONFIGS[name](), dtype=torch.bfloat16)
        for parameter in model.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=3.0 / parameter.shape[-1] ** 0.5)
    model.save_pretrained(folder)
    tiny_tokenizer.save_tokenizer(folder)
    return folder
