"""Both parts of Algorithm 1 in one launch: two programs a row, each for a layer of its own.

What follows of a layer is all rows' matter. So where there is one row each program says that too; where there
are more, they all have to be done first, and it takes another launch.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"
# ruff: noqa: N803 (compile-time constants are written in capitals)

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from hetero_gpu.overlap import meet, overlap_options
from hetero_gpu.routing.caches import DeviceCaches
from hetero_gpu.routing.follow import follow, follow_layer
from hetero_gpu.routing.select import select_row
from hetero_gpu.routing.steer import steer_row


class Said(NamedTuple):
    """What routers said of one token a row. Contiguous."""

    scores: torch.Tensor
    """What the layer's router takes its top-k of, -inf where it excludes an expert: floats `[rows, E]`"""
    own: torch.Tensor
    """What it takes: int64 `[rows, top_k]`"""
    guess: torch.Tensor | None = None
    """What the next layer's router says of this layer's input, as `scores`; None: nobody asked."""


class Decided(NamedTuple):
    experts: torch.Tensor
    """To execute: int64 `[rows, top_k]`. Rows that are not active get the router's own."""
    inserted: torch.Tensor | None
    """For the next layer, where it was guessed: keys, layer * E + expert, int32 `[insertions, rows]`, best
    first, -1 where less."""


class Following(NamedTuple):
    """Eviction scores that follow the caches; see `follow`."""

    score: torch.Tensor
    held: float


def decide(
    caches: DeviceCaches,
    layer: int,
    said: Said,
    *,
    tokens: torch.Tensor,
    active: torch.Tensor,
    following: Following | None = None,
) -> Decided:
    """End the step of `layer`, and begin that of the layer after it where `said` has a guess.

    `tokens` int64 `[rows]`, `active` bool `[rows]`: contiguous, of the first rows of `caches`; rows that are
    not active stay as they are. `following`: what is to follow them, in these layers; None: nothing.
    Asynchronous, capturable.
    """
    rows, is_steered = len(said.scores), said.guess is not None
    alone = following if rows == 1 else None
    experts, inserted = torch.empty_like(said.own), None
    if is_steered:
        inserted = torch.empty((caches.rules.insertions, rows), dtype=torch.int32, device=caches.device)
    _decide_kernel[(rows, 1 + is_steered)](
        said.scores,
        said.own,
        said.guess,
        tokens,
        active,
        experts,
        inserted,
        caches.state,
        caches.tables,
        layer,
        None if alone is None else alone.score,
        None if alone is None else alone.held,
        FORM=caches.form,
        num_warps=1,
        **overlap_options(caches.device),
    )
    if following is not None and alone is None:
        follow(
            caches,
            layer,
            num_layers=1 + is_steered,
            active=active,
            score=following.score,
            held=following.held,
        )
    return Decided(experts, inserted)


@triton.jit(do_not_specialize=["layer"])
def _decide_kernel(
    scores,
    own,
    guess,
    tokens,
    active,
    experts_out,
    inserted_out,
    state,
    tables,
    layer,
    score,
    held,
    FORM: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    meet(OVERLAPS)
    row, layer_here = tl.program_id(0), layer + tl.program_id(1)
    if tl.program_id(1) == 0:
        select_row(row, layer_here, scores, own, tokens, active, experts_out, state, tables, FORM)
    elif guess is not None:
        steer_row(row, layer_here, guess, tokens, active, inserted_out, state, tables, FORM)
    if score is not None:
        tl.debug_barrier()  # the layer's cache is written
        follow_layer(
            layer_here, active, score, state.is_resident, state.priority, held,
            1, FORM.layers, FORM.experts, FORM.expert_block,
        )  # fmt: skip
