"""A part of a layer's dispatch as work for the CPU."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from hetero_runtime.experts.compute import Dispatch
from hetero_runtime.in_place.base import Floats, Integers, Work


class Part(NamedTuple):
    """`rows` `[n]`: which of the layer's tokens the rows of the work's `hidden` are."""

    work: Work
    rows: Integers


def part_of(
    dispatch: Dispatch, numbers: Integers, *, layer: int, hidden: torch.Tensor, weights: Floats
) -> Part:
    """The experts `dispatch.experts[numbers]`, `numbers` ascending. `hidden` `[T, H]`, any float dtype and
    device; `weights` `[T, K]`, on the host. Only rows that these experts want go over."""
    first, end = dispatch.bounds[numbers], dispatch.bounds[numbers + 1]
    positions = np.concatenate([dispatch.order[a:b] for a, b in zip(first, end, strict=True)])
    columns, tokens = np.divmod(positions, dispatch.num_tokens)
    pair_weights = np.ascontiguousarray(weights[tokens, columns])
    if dispatch.num_tokens == 1:
        rows = np.zeros(1, dtype=np.int64)
        chosen = hidden
    else:
        rows, tokens = np.unique(tokens, return_inverse=True)
        chosen = hidden[torch.from_numpy(rows).to(hidden.device)]
    work = Work(
        layer=layer,
        hidden=chosen.detach().float().cpu().contiguous().numpy(),
        experts=dispatch.experts[numbers],
        bounds=np.concatenate([[0], np.cumsum(end - first)]),
        tokens=tokens,
        weights=pair_weights,
    )
    return Part(work, rows)
