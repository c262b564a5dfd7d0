"""Small models that draft, on disk, with the tokenizer of the tiny checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

from tests import tiny_tokenizer


def build_drafter(folder: Path, *, seed: int = 0, **fields: Any) -> Path:
    """A tiny dense model with random weights; `fields` of its MistralConfig win over what stands here."""
    shape: dict[str, Any] = {
        "vocab_size": tiny_tokenizer.VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 256,
        "sliding_window": None,
        "eos_token_id": tiny_tokenizer.END,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.MistralForCausalLM(transformers.MistralConfig(**(shape | fields)))
        for parameter in model.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, 0.0, 1.6 / parameter.shape[-1] ** 0.5)
    model.save_pretrained(folder)
    tiny_tokenizer.save_tokenizer(folder)
    return folder


def nearly(folder: Path, copy: Path, *, noise: float, seed: int = 0) -> Path:
    """The causal model in `folder` with `noise`, in parts of its spread, on its output weights: it says the
    same most of the time."""
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder)
    generator = torch.Generator().manual_seed(seed)
    weight = model.lm_head.weight.data
    weight += noise * weight.std() * torch.randn(weight.shape, generator=generator)
    model.save_pretrained(copy)
    tiny_tokenizer.save_tokenizer(copy)
    return copy
