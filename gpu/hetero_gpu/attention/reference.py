"""Decode attention as the formula says it, in float32: Vaswani et al. 2017, §3.2.1; sinks as in gpt-oss."""

from __future__ import annotations

import torch

from hetero_gpu.attention.base import AttentionForm, HeadNorms, LatentNorm, PairRotation, Rotation


def decode_attention_reference(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    positions: torch.Tensor,
    form: AttentionForm,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `hetero_gpu.attention.decode_attention`. Reads nothing beyond a row's position."""
    rows, heads, _ = query.shape
    group = heads // keys.shape[1]
    output = query.new_empty(rows, heads, values.shape[-1])
    for row in range(rows):
        end = min(int(positions[row]) + 1, keys.shape[2])
        first = 0 if form.window is None else max(0, end - form.window)
        seen_keys = keys[row, :, first:end].float().repeat_interleave(group, 0)  # [heads, seen, key_size]
        seen_values = values[row, :, first:end].float().repeat_interleave(group, 0)
        logits = (seen_keys @ query[row].float()[:, :, None])[..., 0] * form.scaling  # [heads, seen]
        if form.soft_cap is not None:
            logits = form.soft_cap * torch.tanh(logits / form.soft_cap)
        if sinks is not None:
            logits = torch.cat([logits, sinks.float()[:, None]], dim=-1)
        weights = logits.softmax(-1)[:, : end - first]
        output[row] = (weights[:, None] @ seen_values)[:, 0]
    return output


def append_kv_reference(
    new: tuple[torch.Tensor, torch.Tensor],
    cache: tuple[torch.Tensor, torch.Tensor],
    positions: torch.Tensor,
) -> None:
    """See `hetero_gpu.attention.append_kv`."""
    for source, target in zip(new, cache, strict=True):
        for row, position in enumerate(positions.tolist()):
            if position < target.shape[2]:
                target[row, :, position] = source[row, :, 0]


def rotate_append_reference(
    projected: torch.Tensor,
    cache: tuple[torch.Tensor, torch.Tensor],
    positions: torch.Tensor,
    *,
    rotation: Rotation,
    norms: HeadNorms | None,
) -> torch.Tensor:
    """See `hetero_gpu.attention.rotate_append`."""
    rows, kv_heads, _, size = cache[0].shape
    parts = projected.view(rows, -1, size)  # [rows, heads + 2 kv_heads, size]
    query, key, value = parts.split([parts.shape[1] - 2 * kv_heads, kv_heads, kv_heads], dim=1)
    if norms is not None:
        query, key = (_norm(part, weight, norms) for part, weight in ((query, norms[0]), (key, norms[1])))
    query, key = _rotate(query, rotation), _rotate(key, rotation)
    append_kv_reference((key[:, :, None], value[:, :, None]), cache, positions)
    return query


def fold_append_reference(
    new: tuple[torch.Tensor, torch.Tensor],
    cache: tuple[torch.Tensor, torch.Tensor],
    positions: torch.Tensor,
    *,
    weight: torch.Tensor,
    rotation: PairRotation,
    norm: LatentNorm,
) -> torch.Tensor:
    """See `hetero_gpu.attention.fold_append`."""
    (query, latent), (heads, nope, rank) = new, weight.shape
    query = query.unflatten(1, (heads, -1))  # [rows, heads, nope + rotary]
    kept = _norm(latent[:, None, :rank], norm.weight, norm)
    rotary = _rotate_pairs(latent[:, None, rank:], rotation)
    append_kv_reference((kept[:, :, None], rotary[:, :, None]), cache, positions)
    folded = torch.einsum("rhn,hnk->rhk", query[..., :nope].float(), weight.float()).to(query.dtype)
    return torch.cat([folded, _rotate_pairs(query[..., nope:], rotation)], dim=-1)


def expand_latent_reference(latent: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """See `hetero_gpu.attention.expand_latent`."""
    expanded = torch.einsum("rhk,hvk->rhv", latent.float(), weight.float())
    return expanded.flatten(1).to(latent.dtype)


def _rotate_pairs(heads: torch.Tensor, rotation: PairRotation) -> torch.Tensor:
    """`heads` `[rows, heads, size]`; products have the type that multiplication by the tables gives."""
    num_pairs = heads.shape[-1] // 2
    cos, sin = (table[:, None, :num_pairs] for table in (rotation.cos, rotation.sin))
    if rotation.reads_pairs:
        first, second = heads[..., ::2], heads[..., 1::2]
    else:
        first, second = heads.chunk(2, dim=-1)
    turned = torch.stack([first * cos - second * sin, second * cos + first * sin])
    if rotation.writes_pairs:
        return turned.movedim(0, -1).flatten(-2).to(heads.dtype)
    return torch.cat(list(turned), dim=-1).to(heads.dtype)


def _norm(heads: torch.Tensor, weight: torch.Tensor, norms: HeadNorms | LatentNorm) -> torch.Tensor:
    normed = heads.float() * torch.rsqrt(heads.float().pow(2).mean(-1, keepdim=True) + norms.eps)
    if norms.rounds_first:
        normed = normed.to(heads.dtype).float()
    return (normed * (weight.float() + norms.adds_one)).to(heads.dtype)


def _rotate(heads: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    turned, kept = heads[..., : rotation.size], heads[..., rotation.size :]
    low, high = turned.chunk(2, dim=-1)
    repeats = rotation.size // rotation.cos.shape[1]
    cos, sin = (table.repeat(1, repeats)[:, None] for table in (rotation.cos, rotation.sin))
    return torch.cat([turned * cos + torch.cat([-high, low], dim=-1) * sin, kept], dim=-1)
