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
    pairs = _of_one_token(dispatch, numbers) if dispatch.num_tokens == 1 else _of_many(dispatch, numbers)
    chosen = hidden if dispatch.num_tokens == 1 else hidden[torch.from_numpy(pairs.rows).to(hidden.device)]
    work = Work(
        layer=layer,
        hidden=chosen.detach().float().cpu().contiguous().numpy(),
        experts=dispatch.experts[numbers],
        bounds=pairs.bounds,
        tokens=pairs.tokens,
        weights=weights.T.reshape(-1)[pairs.positions],
    )
    return Part(work, pairs.rows)


class _Pairs(NamedTuple):
    """(token, expert) pairs of a part. `positions`: in the transposed routing; `tokens`: in `rows`."""

    positions: Integers
    bounds: Integers
    rows: Integers
    tokens: Integers


def _of_one_token(dispatch: Dispatch, numbers: Integers) -> _Pairs:
    """Each expert has the one token."""
    none = np.zeros(len(numbers), dtype=np.int64)
    return _Pairs(dispatch.order[dispatch.bounds[numbers]], np.arange(len(numbers) + 1), none[:1], none)


def _of_many(dispatch: Dispatch, numbers: Integers) -> _Pairs:
    first, end = dispatch.bounds[numbers], dispatch.bounds[numbers + 1]
    positions = np.concatenate([dispatch.order[a:b] for a, b in zip(first, end, strict=True)])
    rows, tokens = np.unique(positions % dispatch.num_tokens, return_inverse=True)
    return _Pairs(positions, np.concatenate([[0], np.cumsum(end - first)]), rows, tokens)
