"""The attention layer of a step with six launches instead of some twenty.

    hidden ─► one product for q, k and v ─► head norms, rotary, cache write ─► attention (2) ─► o_proj
              (weights side by side)         (one launch)

For layers built as Llama's: three projections, norms of queries and keys or none, rotary embedding in halves.
Whether a layer is one is not read from its name: its own forward and ours run a step on the same random
input, and must agree in the output and in what they wrote. Any other layer keeps its forward.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from transformers.cache_utils import Cache

from hetero_gpu.attention import AttentionForm, HeadNorms, Rotation, decode_attention, rotate_append
from hetero_gpu.linear import linear
from hetero_runtime.hf.attention import AttentionPass, current_pass, is_latent
from hetero_runtime.hf.kv_cache import LayerBuffers, StepLayer
from hetero_runtime.hf.sameness import TOLERANCE, relative_error
from hetero_runtime.hf.small_ops import norm_eps, norm_form

_PROJECTIONS = ("q_proj", "k_proj", "v_proj")
_CHECK_LENGTH = 4


class FusedAttention(NamedTuple):
    """How many layers run fused, and the names of attention layers that keep their own forward."""

    num_layers: int
    left: tuple[str, ...]


@torch.no_grad()
def fuse_attention(model: Any) -> FusedAttention:
    """Fuse what can be in a model whose attention `install` took over. Prefill runs as before.

    Weights of the three projections move side by side, one layer at a time; nothing is kept twice.
    """
    num_layers, left = 0, []
    tables = _rotary_tables(model)
    for name, module in model.named_modules():
        current = current_pass(module)
        if current is None or not hasattr(module, "scaling"):
            continue
        step = _fused_step(module, current, tables) if tables is not None else None
        if step is None:
            left.append(name)
            continue
        module.forward = _step_or_stock(module, current, step)
        num_layers += 1
    return FusedAttention(num_layers, tuple(left))


class _Step:
    """The fused forward of one layer. `rotated`: elements of a head that are rotated. `attends`: the form and
    the sinks with which the layer itself attends."""

    def __init__(
        self,
        module: Any,
        rotated: int,
        *,
        norms: HeadNorms | None,
        attends: tuple[AttentionForm, torch.Tensor | None],
    ) -> None:
        self._module, self._rotated, self._norms = module, rotated, norms
        self._form, self._sinks = attends
        self._has_whole_norms = norms is None and getattr(module, "q_norm", None) is not None
        projections = [getattr(module, name) for name in _PROJECTIONS]
        self._sizes = [projection.out_features for projection in projections]
        self._weight, self._bias = _side_by_side(projections)

    def __call__(
        self,
        hidden: torch.Tensor,
        tables: tuple[torch.Tensor, torch.Tensor],
        layer: StepLayer,
        positions: torch.Tensor,
    ) -> torch.Tensor:
        """`hidden` `[rows, 1, width]` to the same shape; `tables`: cos and sin `[rows or 1, 1, n]`."""
        projected = linear(hidden[:, 0], self._weight, self._bias)
        if self._has_whole_norms:
            query, key, value = projected.split(self._sizes, dim=-1)
            projected = torch.cat([self._module.q_norm(query), self._module.k_norm(key), value], dim=-1)
        rotation = Rotation(tables[0][:, 0], tables[1][:, 0], self._rotated)
        query = rotate_append(projected, layer.buffers, positions, rotation=rotation, norms=self._norms)
        attended = decode_attention(
            query, *layer.buffers, positions=positions, form=self._form, sinks=self._sinks
        )
        projection = self._module.o_proj
        if type(projection) is not torch.nn.Linear:
            output: torch.Tensor = projection(attended.flatten(1)[:, None])
            return output
        return linear(attended.flatten(1), projection.weight, projection.bias)[:, None]


def _step_or_stock(module: Any, current: AttentionPass, step: _Step) -> Callable[..., Any]:
    stock = type(module).forward

    def forward(hidden_states: torch.Tensor, *arguments: Any, **named: Any) -> Any:
        if current.positions is None:
            return stock(module, hidden_states, *arguments, **named)
        cache: Any = named.get("cache", named.get("past_key_values"))
        layer = cache.layers[module.layer_idx]
        return step(hidden_states, named["position_embeddings"], layer, layer.positions), None

    return forward


def _fused_step(module: Any, current: AttentionPass, tables: torch.Tensor) -> _Step | None:
    """A step that agrees with the module's own forward, or None. `tables` `[2, 1, n]`: n and type count."""
    if is_latent(module) or not all(hasattr(module, name) for name in (*_PROJECTIONS, "o_proj")):
        return None
    heads = module.q_proj.out_features // module.head_dim
    if module.o_proj.in_features != heads * module.head_dim:  # queries carry something else besides
        return None
    if getattr(module.config, "clip_qkv", None) is not None:
        return None
    check = _Check(module, current, tables)
    norms = _head_norms(module, check.dtype)
    for rotated in (tables.shape[-1], 2 * tables.shape[-1]):
        if rotated <= module.head_dim:
            step = _Step(module, rotated, norms=norms, attends=check.attends)
            if check.is_passed_by(step):
                return step
    return None


class _Check:
    """A step of two rows at two positions on random input, by the module's own forward."""

    def __init__(self, module: Any, current: AttentionPass, tables: torch.Tensor) -> None:
        weight = module.q_proj.weight
        self.dtype = weight.dtype
        options: dict[str, Any] = {"device": weight.device, "dtype": weight.dtype}
        kv_heads = module.k_proj.out_features // module.head_dim
        self._positions = torch.tensor([2, 0], device=weight.device)
        self._hidden = torch.randn(2, 1, weight.shape[1], **options)
        self._tables = torch.randn(2, 2, 1, tables.shape[-1], device=weight.device).to(tables.dtype)
        self._before = torch.randn(2, 2, kv_heads, _CHECK_LENGTH, module.head_dim, **options)
        self._after = self._before.clone()
        current.positions = self._positions
        try:
            self._output = self._run_stock(module)
        finally:
            current.positions = None
        assert current.last is not None, f"{type(module).__name__} did not attend through our function"
        self.attends = current.last

    def is_passed_by(self, step: _Step) -> bool:
        """Whether `step` gives the same output and leaves the same cache."""
        cache = self._before.clone()
        cos, sin = self._tables
        output = step(self._hidden, (cos, sin), self._layer(cache), self._positions)
        bound = 2 * TOLERANCE[self.dtype]
        return max(relative_error(output, self._output), relative_error(cache, self._after)) <= bound

    def _run_stock(self, module: Any) -> torch.Tensor:
        accepted = inspect.signature(type(module).forward).parameters
        cache_name = "cache" if "cache" in accepted else "past_key_values"
        cache = Cache(layers=[self._layer(self._after)] * (module.layer_idx + 1))
        named = {"position_embeddings": tuple(self._tables), "attention_mask": None, cache_name: cache}
        output: torch.Tensor = type(module).forward(module, self._hidden, **named)[0]
        return output

    def _layer(self, cache: torch.Tensor) -> StepLayer:
        buffers = LayerBuffers(2, _CHECK_LENGTH, is_latent=False)
        buffers.keys, buffers.values = cache
        return StepLayer(buffers, self._positions)


def _head_norms(module: Any, dtype: torch.dtype) -> HeadNorms | None:
    """The norms of single heads; None where there are none, or norms of all heads together."""
    query, key = getattr(module, "q_norm", None), getattr(module, "k_norm", None)
    if query is None or key is None or query.weight.shape != (module.head_dim,):
        return None
    form, eps = norm_form(query, dtype), norm_eps(query)
    if form is None or eps is None or form != norm_form(key, dtype) or eps != norm_eps(key):
        return None
    return HeadNorms(query.weight, key.weight, eps, *form)


def _rotary_tables(model: Any) -> torch.Tensor | None:
    """`[2, 1, n]` cos and sin of one position as the language part makes them, None where it makes none."""
    for module in model.modules():
        if hasattr(module, "rotary_emb") and hasattr(module, "layers"):
            hidden = torch.zeros(1, 1, 1, device=model.device, dtype=model.dtype)
            positions = torch.zeros(1, 1, dtype=torch.long, device=model.device)
            if hasattr(module.rotary_emb, "mrope_section"):  # time, height and width
                positions = positions.expand(3, 1, 1)
            tables = module.rotary_emb(hidden, positions)
            return torch.stack([table[0] for table in tables]) if isinstance(tables, tuple) else None
    return None


def _side_by_side(projections: list[torch.nn.Linear]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """One weight and one bias of which those of the projections become parts."""
    weight = _joined([projection.weight for projection in projections])
    if projections[0].bias is None:
        return weight, None
    return weight, _joined([projection.bias for projection in projections])


def _joined(parameters: list[torch.Tensor]) -> torch.Tensor:
    joined = torch.cat([parameter.data for parameter in parameters])
    parts = joined.split([parameter.shape[0] for parameter in parameters])
    for parameter, part in zip(parameters, parts, strict=True):
        parameter.data = part
    return joined
