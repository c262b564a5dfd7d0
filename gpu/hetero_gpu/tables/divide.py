"""Which misses of a layer the CPU computes: decided on the device, inside `ensure`, before all else is.

    misses = the experts in top_k_index without a slot, each once
    number = number_of[misses, turn], but one for each EMPTY slot is loaded in any case
    of the least worth, by score after this use, then before it, then the router's weight, then number:
        its pairs → in_place, its use observed as `ensure` observes all others'
    all other pairs → kept

How many of so many misses is a table that the host writes (`hetero_scheduler.misses`), so the step asks no
clock. Its columns take turns, one a pass, and neighbouring layers are at different ones: so a layer can load
more now and then, and a step as much as any other. Where the columns are alike, decision for decision what
the eager orchestrator does.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"
# ruff: noqa: N803 (upper case marks what the compiler knows)

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from hetero_gpu.in_place import Calls
from hetero_gpu.tables.observe import observed
from hetero_gpu.tables.state import COUNTERS, NUM_COUNTERS, DeviceTables
from hetero_scheduler import SlotState

TURNS = 4
"""Passes of a layer after which the table's columns begin anew."""

_TURNS = tl.constexpr(TURNS)
_EMPTY = tl.constexpr(int(SlotState.EMPTY))
_COUNTERS = tl.constexpr(NUM_COUNTERS)
_REQUIRED, _MISSES = tl.constexpr(COUNTERS.index("required")), tl.constexpr(COUNTERS.index("misses"))


class Division:
    """Who computes what misses; `calls` go to the CPU."""

    def __init__(self, tables: DeviceTables, calls: Calls) -> None:
        """Nothing is computed in place until `number_of` says so."""
        pairs, device = tables.max_pairs, tables.device
        self.calls = calls
        self.number_of = torch.zeros(pairs + 1, TURNS, dtype=torch.int32, device=device)
        """How many are computed in place when so many experts of a layer miss, by the layer's turn."""
        self.kept = torch.full((pairs,), -1, dtype=torch.int32, device=device)
        """Experts of the pairs of the running layer that the device brings, -1 where the CPU computes."""


class Dividing(NamedTuple):
    """A layer whose misses are divided: what its experts take, `hidden` `[T, H]`, and the router's `weights`
    `[T, K]`; both contiguous."""

    division: Division
    hidden: torch.Tensor
    weights: torch.Tensor


def division_arguments(dividing: Dividing | None) -> tuple[object, ...]:
    """What `ensure` takes of a layer; nothing of it is read where nothing is divided. Raises ValueError for
    tensors that are not contiguous."""
    if dividing is None:
        return (None,) * 5
    division, hidden, weights = dividing
    if not (hidden.is_contiguous() and weights.is_contiguous()):
        raise ValueError("hidden and weights must be contiguous")
    return hidden, weights, division.kept, division.number_of, division.calls.for_kernels(hidden)


@triton.jit
def divide_layer(
    layer,
    top_k_index,
    weights,
    kept,
    number_of,
    calls,
    tables,
    NUM_PAIRS: tl.constexpr,
    NUM_SLOTS: tl.constexpr,
    NUM_LAYERS: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    PAIR_BLOCK: tl.constexpr,
    SLOT_BLOCK: tl.constexpr,
    LAYER_BLOCK: tl.constexpr,
    EXPERT_BLOCK: tl.constexpr,
    POLICY: tl.constexpr,
    HALF_LIFE: tl.constexpr,
):
    """Divide the pairs of `top_k_index` into `kept` and `calls.experts`, by one program."""
    # ---- read
    experts = tl.arange(0, EXPERT_BLOCK)
    is_expert = experts < NUM_EXPERTS
    row = layer * NUM_EXPERTS + experts
    pairs = tl.arange(0, PAIR_BLOCK)
    is_pair = pairs < NUM_PAIRS
    wanted = tl.load(top_k_index + pairs, mask=is_pair, other=-1).to(tl.int32)
    weight = tl.load(weights + pairs, mask=is_pair, other=0.0).to(tl.float32)
    is_wanted = experts[:, None] == wanted[None, :]  # [EXPERT_BLOCK, PAIR_BLOCK]
    is_requested = (tl.max(is_wanted.to(tl.int32), axis=1) > 0) & is_expert
    is_miss = is_requested & (tl.load(tables.slot_of + row, mask=is_expert, other=-1) < 0)
    old_score = tl.load(tables.score + row, mask=is_expert, other=0.0)
    layers = tl.arange(0, LAYER_BLOCK)
    passes_of = tl.load(tables.clock + layers, mask=layers < NUM_LAYERS, other=0)
    passes = tl.sum(tl.where(layers == layer, passes_of, 0), axis=0) + 1
    columns = tl.arange(0, _COUNTERS)
    counted = tl.load(tables.counters + layer * _COUNTERS + columns)
    called = tl.load(calls.num_calls)
    tl.debug_barrier()

    # ---- choose
    new_score = observed(old_score, passes, tl.sum(passes_of, axis=0) + 1, POLICY, HALF_LIFE)
    by_router = tl.sum(tl.where(is_wanted, weight[None, :], 0.0), axis=1)
    num_misses = tl.sum(is_miss.to(tl.int32), axis=0)
    number = num_misses * 0
    if num_misses > 0:
        slots = tl.arange(0, SLOT_BLOCK)
        state = tl.load(tables.slot_state + slots, mask=slots < NUM_SLOTS, other=-1)
        pool_start, pool_end = tl.load(tables.pools + 2 * layer), tl.load(tables.pools + 2 * layer + 1)
        is_empty = (slots >= pool_start) & (slots < pool_end) & (state == _EMPTY)
        most = num_misses - tl.sum(is_empty.to(tl.int32), axis=0)
        turn = ((passes + layer) % _TURNS).to(tl.int32)
        number = tl.minimum(tl.load(number_of + num_misses * _TURNS + turn), tl.maximum(most, 0))
    is_left = is_miss
    num_left = number
    while num_left > 0:
        least = tl.min(tl.where(is_left, new_score, float("inf")), axis=0)
        is_tied = is_left & (new_score == least)
        least_before = tl.min(tl.where(is_tied, old_score, float("inf")), axis=0)
        is_tied = is_tied & (old_score == least_before)
        least_weight = tl.min(tl.where(is_tied, by_router, float("inf")), axis=0)
        is_tied = is_tied & (by_router == least_weight)
        chosen = tl.min(tl.where(is_tied, experts, EXPERT_BLOCK), axis=0)
        is_left = is_left & (experts != chosen)
        num_left -= 1

    # ---- tell
    is_chosen = is_miss & (is_left == 0)
    goes = tl.max((is_wanted & is_chosen[:, None]).to(tl.int32), axis=0) > 0
    tl.store(kept + pairs, tl.where(goes, -1, wanted), mask=is_pair)
    tl.store(calls.experts + pairs, tl.where(goes, wanted, -1), mask=is_pair)
    tl.store(calls.number, number)
    tl.store(calls.num_calls, called + (number > 0).to(tl.int64))
    tl.store(tables.score + row, new_score, mask=is_chosen)
    counted += tl.where((columns == _REQUIRED) | (columns == _MISSES), number, 0)
    tl.store(tables.counters + layer * _COUNTERS + columns, counted)
