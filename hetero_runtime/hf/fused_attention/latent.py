"""Attention over latents, in six launches; eight where the query has a low rank too.

    hidden ─► one product for q and latent ─► fold, norm, rotary, cache write ─► attention (2) ─► expand
              (weights side by side)     ▲    (one launch)                                          ▼
              q of low rank: norm, q_b ──┘                                                        o_proj

Fold: the expansion of latents to keys, moved to the query; expand: that to values, behind attention. Both
read their parts of kv_b_proj's weight where they are.
"""

from __future__ import annotations

from typing import Any

import torch

from hetero_gpu.attention import (
    AttentionForm,
    LatentNorm,
    PairRotation,
    decode_attention,
    expand_latent,
    fold_append,
)
from hetero_runtime.hf.attention import AttentionPass
from hetero_runtime.hf.fused_attention.base import Tables, cos_and_sin
from hetero_runtime.hf.fused_attention.check import Check, Token
from hetero_runtime.hf.fused_attention.joined import Joined, project
from hetero_runtime.hf.kv_cache import StepLayer
from hetero_runtime.hf.small_ops import norm_eps, norm_form

_PARTS = ("kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj")
_SIZES = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank")
_PAIRINGS = ((True, False), (False, False), (True, True))
"""How rotated elements pair, in the input and in the output: side by side, or half the size apart."""


def latent_step(module: Any, current: AttentionPass, tables: Tables) -> LatentStep | None:
    """A step that agrees with the module's own forward, or None. `tables`: of the check's rows."""
    if not all(hasattr(module, name) for name in (*_PARTS, *_SIZES)) or module.kv_b_proj.bias is not None:
        return None
    down = _query_projection(module)
    if down is None:
        return None
    token = Token(1, module.kv_lora_rank, module.qk_rope_head_dim, is_latent=True)
    check = Check(module, current, tables, projection=down, token=token)
    form, eps = norm_form(module.kv_a_layernorm, check.dtype), norm_eps(module.kv_a_layernorm)
    if form is None or eps is None:
        return None
    norm, joined = (
        LatentNorm(module.kv_a_layernorm.weight, eps, *form),
        Joined([down, module.kv_a_proj_with_mqa]),
    )
    for pairing in _PAIRINGS:
        step = LatentStep(module, joined, pairing, norm=norm, attends=check.attends)
        if check.is_passed_by(step):
            return step
    return None


class LatentStep:
    """The fused forward of one layer. `pairing`: one of `_PAIRINGS`. `attends`: the form and the sinks with
    which the layer itself attends."""

    def __init__(
        self,
        module: Any,
        joined: Joined,
        pairing: tuple[bool, bool],
        *,
        norm: LatentNorm,
        attends: tuple[AttentionForm, torch.Tensor | None],
    ) -> None:
        self._module, self._joined, self._pairing, self._norm = module, joined, pairing, norm
        self._form, self._sinks = attends
        nope, value = module.qk_nope_head_dim, module.v_head_dim
        expansion = module.kv_b_proj.weight.unflatten(0, (-1, nope + value))  # [heads, nope + value, rank]
        self._to_keys, self._to_values = expansion.split([nope, value], dim=1)

    def __call__(
        self, hidden: torch.Tensor, tables: Tables, layer: StepLayer, positions: torch.Tensor
    ) -> torch.Tensor:
        """See `Step`."""
        query, latent = self._joined(hidden[:, 0]).split(self._joined.sizes, dim=-1)
        if getattr(self._module, "q_b_proj", None) is not None:
            query = project(self._module.q_b_proj, self._module.q_a_layernorm(query))
        rotation = PairRotation(*cos_and_sin(tables), *self._pairing)
        folded = fold_append(
            (query, latent),
            layer.buffers,
            positions,
            weight=self._to_keys,
            rotation=rotation,
            norm=self._norm,
        )
        attended = decode_attention(
            folded, *layer.attended, positions=positions, form=self._form, sinks=self._sinks
        )
        return project(self._module.o_proj, expand_latent(attended, self._to_values))[:, None]


def _query_projection(module: Any) -> torch.nn.Linear | None:
    """What makes queries of hidden states, or their low rank; None where that is no plain product."""
    down = getattr(module, "q_proj", None)
    if down is None and hasattr(module, "q_b_proj") and hasattr(module, "q_a_layernorm"):
        down = getattr(module, "q_a_proj", None)
    return down if type(down) is torch.nn.Linear else None
