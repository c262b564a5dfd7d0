"""Attention over keys and values of heads, in six launches.

    hidden ─► one product for q, k and v ─► head norms, rotary, cache write ─► attention (2) ─► o_proj
              (weights side by side)         (one launch)

For layers built as Llama's: three projections, norms of queries and keys or none, rotary embedding in halves.
"""

from __future__ import annotations

from typing import Any

import torch

from hetero_gpu.attention import AttentionForm, HeadNorms, Rotation, decode_attention, rotate_append
from hetero_runtime.hf.attention import AttentionPass
from hetero_runtime.hf.fused_attention.base import Tables, cos_and_sin
from hetero_runtime.hf.fused_attention.check import Check, Token
from hetero_runtime.hf.fused_attention.joined import Joined, project
from hetero_runtime.hf.kv_cache import StepLayer
from hetero_runtime.hf.small_ops import norm_eps, norm_form

_PROJECTIONS = ("q_proj", "k_proj", "v_proj")


def heads_step(module: Any, current: AttentionPass, tables: Tables) -> HeadsStep | None:
    """A step that agrees with the module's own forward, or None. `tables`: of the check's rows."""
    if not all(hasattr(module, name) for name in (*_PROJECTIONS, "o_proj")) or not isinstance(tables, tuple):
        return None
    heads, size = module.q_proj.out_features // module.head_dim, module.head_dim
    if module.o_proj.in_features != heads * size:  # queries carry something else besides
        return None
    if getattr(module.config, "clip_qkv", None) is not None:
        return None
    token = Token(module.k_proj.out_features // size, size, size)
    check = Check(module, current, tables, projection=module.q_proj, token=token)
    norms, joined = _head_norms(module, check.dtype), Joined([getattr(module, n) for n in _PROJECTIONS])
    width = tables[0].shape[-1]
    for rotated in (width, 2 * width):
        if rotated <= size:
            step = HeadsStep(module, joined, rotated, norms=norms, attends=check.attends)
            if check.is_passed_by(step):
                return step
    return None


class HeadsStep:
    """The fused forward of one layer. `rotated`: elements of a head that are rotated. `attends`: the form and
    the sinks with which the layer itself attends."""

    def __init__(
        self,
        module: Any,
        joined: Joined,
        rotated: int,
        *,
        norms: HeadNorms | None,
        attends: tuple[AttentionForm, torch.Tensor | None],
    ) -> None:
        self._module, self._joined, self._rotated, self._norms = module, joined, rotated, norms
        self._form, self._sinks = attends
        self._has_whole_norms = norms is None and getattr(module, "q_norm", None) is not None

    def __call__(
        self, hidden: torch.Tensor, tables: Tables, layer: StepLayer, positions: torch.Tensor
    ) -> torch.Tensor:
        """See `Step`."""
        projected = self._joined(hidden[:, 0])
        if self._has_whole_norms:
            query, key, value = projected.split(self._joined.sizes, dim=-1)
            projected = torch.cat([self._module.q_norm(query), self._module.k_norm(key), value], dim=-1)
        rotation = Rotation(*cos_and_sin(tables), self._rotated)
        query = rotate_append(projected, layer.buffers, positions, rotation=rotation, norms=self._norms)
        attended = decode_attention(
            query, *layer.attended, positions=positions, form=self._form, sinks=self._sinks
        )
        return project(self._module.o_proj, attended.flatten(1))[:, None]


def _head_norms(module: Any, dtype: torch.dtype) -> HeadNorms | None:
    """The norms of single heads; None where there are none, or norms of all heads together."""
    query, key = getattr(module, "q_norm", None), getattr(module, "k_norm", None)
    if query is None or key is None or query.weight.shape != (module.head_dim,):
        return None
    form, eps = norm_form(query, dtype), norm_eps(query)
    if form is None or eps is None or form != norm_form(key, dtype) or eps != norm_eps(key):
        return None
    return HeadNorms(query.weight, key.weight, eps, *form)
