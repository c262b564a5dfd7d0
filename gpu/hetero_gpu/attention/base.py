"""What kind of attention a layer computes, and what comes before it."""

from __future__ import annotations

from typing import NamedTuple

import torch


class AttentionForm(NamedTuple):
    """`scaling` of query·key; `window`: how many of the last tokens are seen, the query's own included (None:
    all); `soft_cap`: logits become `soft_cap · tanh(logit / soft_cap)`."""

    scaling: float
    window: int | None = None
    soft_cap: float | None = None


class Rotation(NamedTuple):
    """Rotary embedding of the first `size` elements of each head. `cos` and `sin` `[rows or 1, width]`:
    a value for each element (width = size) or the same for both halves (width = size / 2)."""

    cos: torch.Tensor
    sin: torch.Tensor
    size: int


class HeadNorms(NamedTuple):
    """RMS norms of each query and each key head, weights `[size]`; details as in `norms.NormForm`."""

    query_weight: torch.Tensor
    key_weight: torch.Tensor
    eps: float
    adds_one: bool
    rounds_first: bool


class PairRotation(NamedTuple):
    """Rotary embedding of all elements of a vector, two and two. `cos` and `sin` `[rows or 1, pairs or
    more]`: one value a pair, those behind do not count. `reads_pairs`: a pair stands side by side in the
    input, not half the size apart; `writes_pairs`: the same in the output."""

    cos: torch.Tensor
    sin: torch.Tensor
    reads_pairs: bool
    writes_pairs: bool


class LatentNorm(NamedTuple):
    """The RMS norm of a latent vector, `weight` `[rank]`; details as in `norms.NormForm`."""

    weight: torch.Tensor
    eps: float
    adds_one: bool
    rounds_first: bool
