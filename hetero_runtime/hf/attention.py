"""Our attention in transformers' attention registry, and which models can decode through it inside a graph.

    prefill   keys [1, kv_heads, tokens so far, size]   causal by shape: the last query stands at the last key
    step      keys [rows, kv_heads, max_length, size]   one query a row, at a position only the device knows

transformers makes no mask for an attention function that is not in its mask registry, and ours needs none.
So a step has no tensor whose shape or content depends on how many tokens there are: it is captured once.

Latent attention (DeepSeek): transformers caches a latent vector a token and expands all of them to keys and
values in every step, the empty places of a fixed cache too. A step of ours attends over the latents
themselves, the expansion moved to the query and the output (DeepSeek-V2, arXiv 2405.04434, §2.1.2).
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.modeling_utils import AttentionInterface

from hetero_gpu.attention import AttentionForm, decode_attention, prefill_attention
from hetero_runtime.plan.captured import why_model_needs_host
from hetero_runtime.plan.model_config import rope_types

IMPLEMENTATION = "hetero_decode"

_PASS = "_hetero_attention_pass"


class AttentionPass:
    """What the pass under way attends to. One for each model, seen by all its attention layers.

    `positions` `[rows]`: where the token of each row stands, during a step; None during prefill. `behind`:
    the same in the caches of the layers from `first_behind` on, where prompts have lost tokens. `last`: what
    the last layer of a step asked for, attention form and sinks.
    """

    def __init__(self) -> None:
        self.positions: torch.Tensor | None = None
        self.behind: torch.Tensor | None = None
        self.first_behind = 0
        self.last: tuple[AttentionForm, torch.Tensor | None] | None = None

    def positions_in(self, layer: int) -> torch.Tensor:
        """Where the tokens of a step stand in the cache of decoder layer `layer`."""
        is_behind = self.behind is not None and layer >= self.first_behind
        positions = self.behind if is_behind else self.positions
        assert positions is not None, "a prompt's positions are its shape"
        return positions


def install(model: Any) -> AttentionPass:
    """Make the language part of `model` attend through our function from now on.

    Other caches than ours keep working with it: transformers' own are served as prefill.
    """
    current = AttentionPass()
    for module in model.modules():
        if not hasattr(module, "layer_idx"):
            continue
        # past nn.Module.__setattr__, which is for parameters and modules
        object.__setattr__(module, _PASS, current)
        if is_latent(module):
            object.__setattr__(module, "expand_kv", _expand_unless_step(module, current))
    model.config.get_text_config(decoder=True)._attn_implementation = IMPLEMENTATION
    return current


def is_latent(module: Any) -> bool:
    """Whether an attention module caches latent vectors and expands them to keys and values."""
    return hasattr(module, "expand_kv") and hasattr(module, "kv_b_proj")


def latent_layers(model: Any) -> frozenset[int]:
    """Indices of the layers with latent attention."""
    return frozenset(int(module.layer_idx) for module in model.modules() if is_latent(module))


def why_not_capturable(config: Any) -> str | None:
    """The reason why a decode step of this model needs the host, or None. `config`: transformers' own."""
    text = config.get_text_config(decoder=True)
    return why_model_needs_host(layer_kinds(config), rope_types(getattr(text, "rope_parameters", None)))


def layer_kinds(config: Any) -> tuple[str, ...]:
    """Kinds of its layers' attention, where the model has several. `config`: transformers' own."""
    return tuple(getattr(config.get_text_config(decoder=True), "layer_types", None) or ())


def current_pass(module: Any) -> AttentionPass | None:
    """What `install` gave this module; None for one that is no layer of the language part."""
    current: AttentionPass | None = getattr(module, _PASS, None)
    return current


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **arguments: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers calls: `query` `[rows, heads, n, size]`; returns `[rows, n, heads, value size]`."""
    assert attention_mask is None, f"{type(module).__name__} asks for a mask of its own"
    sinks = arguments.get("s_aux")
    form = AttentionForm(
        scaling=arguments["scaling"],
        window=arguments.get("sliding_window") or getattr(module, "sliding_window", None) or None,
        soft_cap=arguments.get("softcap"),
    )
    current = current_pass(module)
    if current is None or current.positions is None:
        output = prefill_attention(query, key, value, form=form, sinks=sinks)
        return output.transpose(1, 2).contiguous(), None
    current.last = form, sinks
    attend = _attend_latent if is_latent(module) else _attend_step
    positions = current.positions_in(int(module.layer_idx))  # type: ignore[arg-type]
    return attend(module, query[:, :, 0], (key, value), positions, form, sinks)[:, None], None


def _attend_step(
    _module: Any,
    query: torch.Tensor,
    cache: tuple[torch.Tensor, torch.Tensor],
    positions: torch.Tensor,
    form: AttentionForm,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """`query` `[rows, heads, size]` to `[rows, heads, value size]`."""
    return decode_attention(query, *cache, positions=positions, form=form, sinks=sinks)


def _attend_latent(
    module: Any,
    query: torch.Tensor,
    cache: tuple[torch.Tensor, torch.Tensor],
    positions: torch.Tensor,
    form: AttentionForm,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """The same over latents: `cache` is (latent ‖ rotary, latent), one KV head for all query heads."""
    rows, heads, _ = query.shape
    nope = module.qk_nope_head_dim
    weight = module.kv_b_proj.weight.view(heads, nope + module.v_head_dim, -1)  # [heads, nope + value, rank]
    latent_query = torch.bmm(query[..., :nope].transpose(0, 1), weight[:, :nope])  # [heads, rows, rank]
    folded = torch.cat([latent_query.transpose(0, 1), query[..., nope:]], dim=-1)
    latent = _attend_step(module, folded, cache, positions, form, sinks)  # [rows, heads, rank]
    output = torch.bmm(latent.transpose(0, 1), weight[:, nope:].transpose(1, 2))  # [heads, rows, value]
    return output.transpose(0, 1).reshape(rows, heads, -1)


def _expand_unless_step(module: Any, current: AttentionPass) -> Any:
    expand = type(module).expand_kv

    def expand_kv(latent: torch.Tensor, rotary: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if current.positions is not None:
            return latent, rotary  # what our step cache returned: (latent ‖ rotary, latent)
        expanded: tuple[torch.Tensor, torch.Tensor] = expand(module, latent, rotary)
        return expanded

    return expand_kv


AttentionInterface.register(IMPLEMENTATION, _attend)
