"""What the tokens of a vision encoder receive from one attention module, without its weights kept anywhere.

transformers looks attention up by the name in a module's config. The module that is listened to gets a config
of its own with our name: it attends as before, in every bit, and what its keys receive can be computed beside
it from the same queries and keys. No other layer of the encoder computes weights.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from typing import Any

import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

IMPLEMENTATION = "hetero_listened"
_ATTENDS = "sdpa"
"""What transformers chooses, and what goes on to attend."""
_HEAR = "_hetero_hear"
_MOST_WEIGHTS = {"cpu": 1 << 22, "cuda": 1 << 25}
"""Attention weights in memory at once, by device, about eight bytes each; a large image has billions. A GPU
that gets them in smaller parts waits for launches."""

HearAttention = Callable[[torch.Tensor, torch.Tensor, float], None]
"""Told, for each call of the module, queries and keys `[batch, heads, patches, size]` and their scaling."""


def listen_to_attention(module: nn.Module, hear: HearAttention) -> None:
    """From now on `hear` is told of every call of `module`, one of transformers' attention modules."""
    listened: Any = module
    config = copy(listened.config)
    assert config._attn_implementation == _ATTENDS, f"the encoder attends by {config._attn_implementation}"
    config._attn_implementation = IMPLEMENTATION
    listened.config = config
    # past nn.Module.__setattr__, which would try to register what it is given
    object.__setattr__(module, _HEAR, hear)


def received_attention(query: torch.Tensor, key: torch.Tensor, *, scaling: float) -> torch.Tensor:
    """What each key receives: the mean over heads and queries of softmax(query · key · scaling), VisMMOE
    §3.2.1. `[batch, heads, n, size]` to float32 `[batch, n]`, whose rows sum to 1."""
    batch, heads, num_queries, _ = query.shape
    keys = key.flatten(0, 1).transpose(1, 2)  # [batch * heads, size, n]
    num_rows, _, num_keys = keys.shape
    total = torch.zeros(num_rows, num_keys, dtype=torch.float32, device=key.device)
    nothing = query.new_zeros(1, 1, 1)  # is not added, so that scaling takes no pass of its own
    most = _MOST_WEIGHTS.get(key.device.type, _MOST_WEIGHTS["cpu"])
    for queries in query.flatten(0, 1).split(max(1, most // (num_rows * num_keys)), dim=1):
        scores = torch.baddbmm(nothing, queries, keys, beta=0, alpha=scaling)
        total += scores.softmax(dim=-1, dtype=torch.float32).sum(dim=1)
    return total.view(batch, heads, num_keys).sum(dim=1) / (heads * num_queries)


def _attend(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
) -> Any:
    getattr(module, _HEAR)(query, key, kwargs["scaling"])
    return ALL_ATTENTION_FUNCTIONS[_ATTENDS](module, query, key, value, *args, **kwargs)


AttentionInterface.register(IMPLEMENTATION, _attend)
