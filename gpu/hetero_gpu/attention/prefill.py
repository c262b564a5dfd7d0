"""Attention of a prompt: many query tokens of one row over the keys so far, in torch.

Where a plain causal SDPA says it all, it is used. Windows, sinks, soft caps and prompts that continue a row
go in blocks of queries, so that no score matrix is larger than one block by the keys it can see:

    queries 512..1023, window 128:   keys 385..1023
"""

from __future__ import annotations

import torch
from torch.nn import functional

from hetero_gpu.attention.base import AttentionForm

_QUERIES = 512


def prefill_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    form: AttentionForm,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention where the last query stands at the last key.

    `query` `[rows, heads, n, key_size]`, `keys` `[rows, kv_heads, m, key_size]`, `values` likewise, m >= n,
    `sinks` `[heads]` or None. Returns `[rows, heads, n, value_size]`.
    """
    num_queries, num_keys = query.shape[2], keys.shape[2]
    group = query.shape[1] // keys.shape[1]
    is_windowed = form.window is not None and form.window < num_keys
    is_plain = form.soft_cap is None and sinks is None
    if is_plain and not is_windowed and (num_queries == num_keys or num_queries == 1):
        return functional.scaled_dot_product_attention(
            query,
            _repeat(keys, group),
            _repeat(values, group),
            scale=form.scaling,
            is_causal=num_queries > 1,
        )
    attend = _attend_plain if is_plain else _attend_with_sinks
    parts = []
    for start in range(0, num_queries, _QUERIES):
        block = query[:, :, start : start + _QUERIES]
        position = num_keys - num_queries + start
        end = position + block.shape[2]
        first = max(0, position + 1 - form.window) if form.window is not None else 0
        queries_at = torch.arange(position, end, device=query.device)[:, None]
        keys_at = torch.arange(first, end, device=query.device)[None]
        is_seen = keys_at <= queries_at
        if form.window is not None:
            is_seen &= keys_at > queries_at - form.window
        seen_keys, seen_values = (_repeat(cached[:, :, first:end], group) for cached in (keys, values))
        parts.append(attend(block, seen_keys, seen_values, is_seen, form, sinks))
    return torch.cat(parts, dim=2)


def _repeat(cached: torch.Tensor, group: int) -> torch.Tensor:
    """`[rows, kv_heads, m, size]` to one copy a query head."""
    return cached if group == 1 else cached.repeat_interleave(group, dim=1)


def _attend_plain(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    is_seen: torch.Tensor,
    form: AttentionForm,
    _sinks: torch.Tensor | None,
) -> torch.Tensor:
    return functional.scaled_dot_product_attention(query, keys, values, attn_mask=is_seen, scale=form.scaling)


def _attend_with_sinks(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    is_seen: torch.Tensor,
    form: AttentionForm,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    logits = (query @ keys.transpose(2, 3)).float() * form.scaling  # [rows, heads, n, m]
    if form.soft_cap is not None:
        logits = form.soft_cap * torch.tanh(logits / form.soft_cap)
    logits = logits.masked_fill(~is_seen, float("-inf"))
    if sinks is not None:
        column = sinks.float()[None, :, None, None].expand(*logits.shape[:3], 1)
        logits = torch.cat([logits, column], dim=-1)
    weights = logits.softmax(-1)[..., : keys.shape[2]]
    return weights.to(values.dtype) @ values
