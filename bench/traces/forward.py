"""The model's forward for whole windows, layer after layer.

transformers' own asks whether it is being captured and then builds a mask of every window, which keeps
attention from its fastest kernel. Windows are causal and never padded, so there is nothing to mask.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import Qwen3MoeForCausalLM


def hidden_states(model: Qwen3MoeForCausalLM, input_ids: Tensor) -> Tensor:
    """Hidden states before the output head, `[batch, steps, hidden]`, of `input_ids` `[batch, steps]`."""
    base = model.model
    positions = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
    hidden: Tensor = base.embed_tokens(input_ids)
    rotary = base.rotary_emb(hidden, position_ids=positions)
    for layer in base.layers:
        hidden = layer(hidden, attention_mask=None, position_ids=positions, position_embeddings=rotary)
    normed: Tensor = base.norm(hidden)
    return normed
