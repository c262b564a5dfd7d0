"""The folder that ships: weights in bf16, tokenizer, chat template, generation defaults."""

from __future__ import annotations

import copy
from pathlib import Path

from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3MoeForCausalLM

from bench.models import chat

_SHARD_SIZE = "12MB"


def as_shipped(model: Qwen3MoeForCausalLM, tokenizer: PreTrainedTokenizerFast) -> Qwen3MoeForCausalLM:
    """A bf16 copy of a model in training, with generation defaults: what is measured is what ships."""
    with model.device:
        fresh = Qwen3MoeForCausalLM(copy.deepcopy(model.config))
    fresh.bfloat16()
    fresh.load_state_dict(model.state_dict())
    fresh.generation_config = GenerationConfig(
        do_sample=True,
        temperature=0.8,
        top_p=0.95,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=[tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids(chat.END)],
        pad_token_id=tokenizer.pad_token_id,
    )
    fresh.eval()
    return fresh


def save_model(shipped: Qwen3MoeForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write `config.json`, `generation_config.json`, safetensors shards of 12 MB and the tokenizer."""
    shipped.save_pretrained(folder, max_shard_size=_SHARD_SIZE)
    tokenizer.save_pretrained(folder)
