"""The attention layer of a step with few launches instead of some twenty, prefill as before.

base      the contract: a forward of one step
joined    weights of several projections side by side
check     whether a layer's own forward and ours say the same
heads     keys and values of heads, as Llama has them
latent    latents in the cache, as DeepSeek has them

Which of them a layer is, if any, is not read from its name: its own forward and ours run a step on the same
random input, and must agree in the output and in what they wrote. Any other layer keeps its forward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from hetero_runtime.hf.attention import AttentionPass, current_pass, is_latent
from hetero_runtime.hf.fused_attention.base import Step, Tables
from hetero_runtime.hf.fused_attention.check import NUM_ROWS
from hetero_runtime.hf.fused_attention.heads import heads_step
from hetero_runtime.hf.fused_attention.latent import latent_step

__all__ = ["FusedAttention", "fuse_attention"]

_POSITIONS = (11, 5)
"""For which a check rotates: far enough from each other and from 0 to tell rotations apart."""


class FusedAttention(NamedTuple):
    """How many layers run fused, and the names of attention layers that keep their own forward."""

    num_layers: int
    left: tuple[str, ...]


@torch.no_grad()
def fuse_attention(model: Any) -> FusedAttention:
    """Fuse what can be in a model whose attention `install` took over. Prefill runs as before.

    Weights of projections of the same input move side by side, one layer at a time; nothing is kept twice.
    """
    num_layers, left = 0, []
    tables = _rotary_tables(model)
    for name, module in model.named_modules():
        current = current_pass(module)
        if current is None or not hasattr(module, "scaling"):
            continue
        find = latent_step if is_latent(module) else heads_step
        step = None if tables is None else find(module, current, tables)
        if step is None:
            left.append(name)
            continue
        module.forward = _step_or_stock(module, current, step)
        num_layers += 1
    return FusedAttention(num_layers, tuple(left))


def _step_or_stock(module: Any, current: AttentionPass, step: Step) -> Callable[..., Any]:
    stock = type(module).forward

    def forward(hidden_states: torch.Tensor, *arguments: Any, **named: Any) -> Any:
        if current.positions is None:
            return stock(module, hidden_states, *arguments, **named)
        cache: Any = named.get("cache", named.get("past_key_values"))
        layer = cache.layers[module.layer_idx]
        return step(hidden_states, named["position_embeddings"], layer, layer.positions), None

    return forward


def _rotary_tables(model: Any) -> Tables | None:
    """What the language part makes for the rows of a check, None where it makes something else."""
    for module in model.modules():
        if hasattr(module, "rotary_emb") and hasattr(module, "layers"):
            hidden = torch.zeros(NUM_ROWS, 1, 1, device=model.device, dtype=model.dtype)
            positions = torch.tensor(_POSITIONS, device=model.device)[:, None]  # [rows, 1]
            if hasattr(module.rotary_emb, "mrope_section"):  # time, height and width
                positions = positions.expand(3, NUM_ROWS, 1)
            tables = module.rotary_emb(hidden, positions)
            return tables if isinstance(tables, (tuple, torch.Tensor)) else None
    return None
