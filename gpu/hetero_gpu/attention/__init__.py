"""Attention over a KV cache of fixed size, filled to a length that only the device knows.

decode   one query token a row, split-K kernel: time grows with the tokens present
append   writes one token's keys and values at each row's position
rotate   head norms, rotary embedding and that write in one launch
fold     latent attention: the same, with keys' expansion moved to the query
expand   latent attention: what was attended to, expanded to values
prefill  many query tokens of one row, in torch

Devices without Triton (CPU) compute with `reference`.
"""

from __future__ import annotations

import torch

from hetero_gpu.attention.base import AttentionForm, HeadNorms, LatentNorm, PairRotation, Rotation
from hetero_gpu.attention.prefill import prefill_attention

__all__ = [
    "AttentionForm",
    "HeadNorms",
    "LatentNorm",
    "PairRotation",
    "Rotation",
    "append_kv",
    "decode_attention",
    "expand_latent",
    "fold_append",
    "prefill_attention",
    "rotate_append",
]


def decode_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    positions: torch.Tensor,
    form: AttentionForm,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend from one token of each row to the keys at its position and before.

    `query` `[rows, heads, key_size]`, `keys` `[rows, kv_heads, max_length, key_size]`, `values` the same with
    its own head size, `positions` `[rows]` (int32 or int64, on the device; beyond the end they count as the
    last), `sinks` `[heads]`: one logit a head that takes part in the softmax and carries no value. Returns
    `[rows, heads, value_size]`. On a GPU no host synchronisation; the same inputs give the same bits.
    """
    if query.device.type == "cpu":
        from hetero_gpu.attention.reference import decode_attention_reference as implementation
    else:
        from hetero_gpu.attention.decode import decode_attention_split as implementation
    return implementation(query, keys, values, positions=positions, form=form, sinks=sinks)


def append_kv(
    new: tuple[torch.Tensor, torch.Tensor],
    cache: tuple[torch.Tensor, torch.Tensor],
    positions: torch.Tensor,
) -> None:
    """Write one token's keys and values of each row into `cache` at `positions` `[rows]`.

    `new` and `cache` are (keys, values), `[rows, kv_heads, 1, size]` and `[rows, kv_heads, max_length,
    size]`. A position at or beyond max_length writes nothing. No host synchronisation on a GPU.
    """
    if positions.device.type == "cpu":
        from hetero_gpu.attention.reference import append_kv_reference as implementation
    else:
        from hetero_gpu.attention.append import append_kv_kernel as implementation
    implementation(new, cache, positions)


def rotate_append(
    projected: torch.Tensor,
    cache: tuple[torch.Tensor, torch.Tensor],
    positions: torch.Tensor,
    *,
    rotation: Rotation,
    norms: HeadNorms | None = None,
) -> torch.Tensor:
    """Norm and rotate query and key heads, write keys and values at `positions`, return the query heads.

    `projected` `[rows, (heads + 2 · kv_heads) · size]`: queries, keys, values of one token a row. `cache` as
    for `append_kv`, both of head size `size`. Returns `[rows, heads, size]`. On a GPU no host
    synchronisation.
    """
    if positions.device.type == "cpu":
        from hetero_gpu.attention.reference import rotate_append_reference as implementation
    else:
        from hetero_gpu.attention.rotate import rotate_append_kernel as implementation
    return implementation(projected, cache, positions, rotation=rotation, norms=norms)


def fold_append(
    new: tuple[torch.Tensor, torch.Tensor],
    cache: tuple[torch.Tensor, torch.Tensor],
    positions: torch.Tensor,
    *,
    weight: torch.Tensor,
    rotation: PairRotation,
    norm: LatentNorm,
) -> torch.Tensor:
    """Norm the latent, rotate it and the query, write it at `positions`, return the query over latents.

    `new`: query `[rows, heads · (nope + rotary)]` and latent `[rows, rank + rotary]` of one token a row.
    `cache`: latents `[rows, 1, max_length, rank]` and rotated keys `[rows, 1, max_length, rotary]`; a
    position at or beyond max_length writes nothing. `weight` `[heads, nope, rank]`: what expands latents to
    keys. Returns `[rows, heads, rank + rotary]`. On a GPU no host synchronisation, and the weight may be read
    while the kernel that was launched just before still runs, so that one may not write it.
    """
    if positions.device.type == "cpu":
        from hetero_gpu.attention.reference import fold_append_reference as implementation
    else:
        from hetero_gpu.attention.fold import fold_append_kernel as implementation
    return implementation(new, cache, positions, weight=weight, rotation=rotation, norm=norm)


def expand_latent(latent: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """What each head attended to, `latent` `[rows, heads, rank]`, by `weight` `[heads, value, rank]`.

    Returns `[rows, heads · value]`, heads side by side. On a GPU as for `fold_append`.
    """
    if latent.device.type == "cpu":
        from hetero_gpu.attention.reference import expand_latent_reference as implementation
    else:
        from hetero_gpu.attention.expand import expand_latent_kernel as implementation
    return implementation(latent, weight)
