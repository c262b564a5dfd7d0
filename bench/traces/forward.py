"""The model's forward for whole windows, layer after layer, and the precision of its routers.

transformers' own asks whether it is being captured and then builds a mask of every window, which keeps
attention from its fastest kernel. Windows are causal, and padded on the right at most, so there is nothing to
mask.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen3MoeForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter


def keep_routers_precise(model: Qwen3MoeForCausalLM) -> None:
    """Let routers compute in float32, whatever autocast says, in place.

    Logits of the experts around the k-th are closer to each other than bfloat16 can tell.
    """
    for module in model.modules():
        if isinstance(module, Qwen3MoeTopKRouter):
            module.forward = partial(_in_float32, module.forward)  # type: ignore[method-assign]


def _in_float32(forward: Any, hidden: Tensor) -> Any:
    with torch.autocast(hidden.device.type, enabled=False):
        return forward(hidden.float())


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
