"""Cache-only replays, compiled: a token of 48 layers × 128 experts in a fraction of a millisecond.

Without prefetches nothing depends on time, and for the policies of `use_scores` a score is known beforehand.
The kernel then makes the slot machine's decisions: EMPTY slots first, from the lowest; otherwise the slot of
least score that holds no expert of the layer being run, ties to the lowest. The tests hold each decision to
the slot machine's.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numba
import numpy as np
import numpy.typing as npt

from hetero_scheduler.simulator.use_scores import Experts, UseScores

_NONE = -1


class CacheReplay(NamedTuple):
    """`slot` int32 and `is_hit` bool, `[tokens, layers, top_k]`, experts of a layer in ascending order."""

    slot: npt.NDArray[np.int32]
    is_hit: npt.NDArray[np.bool_]


class _Tables(NamedTuple):
    """State of the cache. Keys are layer * num_experts + expert."""

    slot_of: npt.NDArray[np.int32]
    """By key."""
    key: npt.NDArray[np.int32]
    """By slot."""
    score: npt.NDArray[np.float64]
    """By slot; infinite while the expert's layer runs."""
    filled: npt.NDArray[np.int64]
    """By pool, named after its first layer: its first EMPTY slot. Slots fill upwards and stay filled."""


def replay_cache(needed: Experts, scores: UseScores, pools: list[range], *, num_experts: int) -> CacheReplay:
    """Run `needed` (`[tokens, layers, top_k]`, ascending along top_k) through a cache without prefetches.

    `pools`: the slots that each layer may use, at least top_k; the same for all layers, or apart.
    """
    assert min(map(len, pools)) >= needed.shape[-1], "a layer's experts do not fit in its slots"
    bounds = np.array([(pool.start, pool.stop) for pool in pools], dtype=np.int64)
    num_slots = int(bounds.max())
    tables = _Tables(
        np.full(len(pools) * num_experts, _NONE, np.int32),
        np.full(num_slots, _NONE, np.int32),
        np.full(num_slots, -np.inf),
        bounds[:, 0].copy(),
    )
    keys = needed + num_experts * np.arange(len(pools), dtype=np.int32)[:, None]
    replay = CacheReplay(np.empty(needed.shape, np.int32), np.empty(needed.shape, np.bool_))
    in_sight = scores.at_use if scores.in_sight is None else scores.in_sight
    _replay(keys, UseScores(scores.at_use, in_sight, scores.window), bounds, tables, replay)
    return replay


@numba.njit(nogil=True, boundscheck=False)
def _replay(keys: Any, scores: Any, bounds: Any, tables: Any, replay: Any) -> None:
    num_tokens, num_layers, top_k = keys.shape
    for t in range(num_tokens):
        for layer in range(num_layers):
            if scores.window and t + scores.window < num_tokens:
                _come_into_sight(
                    keys[t + scores.window, layer], scores.in_sight[t + scores.window, layer], tables
                )
            slots = replay.slot[t, layer]
            for k in range(top_k):
                slots[k] = tables.slot_of[keys[t, layer, k]]
                replay.is_hit[t, layer, k] = slots[k] != _NONE
                if slots[k] != _NONE:
                    tables.score[slots[k]] = np.inf
            for k in range(top_k):
                if slots[k] == _NONE:
                    pool = layer if bounds[layer, 0] else 0
                    slots[k] = _take_slot(pool, bounds[layer], tables)
                    tables.key[slots[k]] = keys[t, layer, k]
                    tables.slot_of[keys[t, layer, k]] = slots[k]
                    tables.score[slots[k]] = np.inf
            for k in range(top_k):
                tables.score[slots[k]] = scores.at_use[t, layer, k]


@numba.njit(nogil=True, boundscheck=False)
def _come_into_sight(keys: Any, scores: Any, tables: Any) -> None:
    for k in range(keys.size):
        slot = tables.slot_of[keys[k]]
        if slot != _NONE and not np.isnan(scores[k]):
            tables.score[slot] = scores[k]


@numba.njit(nogil=True, boundscheck=False)
def _take_slot(pool: Any, bounds: Any, tables: Any) -> Any:
    """An EMPTY slot of the pool, or the one of least score, whose expert leaves."""
    if tables.filled[pool] < bounds[1]:
        tables.filled[pool] += 1
        return tables.filled[pool] - 1
    slot = bounds[0] + _first_least(tables.score[bounds[0] : bounds[1]])
    tables.slot_of[tables.key[slot]] = _NONE
    return slot


@numba.njit(nogil=True, boundscheck=False, fastmath={"nnan", "nsz"})
def _first_least(score: Any) -> Any:
    """Index of the first of the least. In two passes: the first one is vectorised, there being no NaN."""
    least = score[0]
    for value in score:
        least = min(least, value)
    for slot in range(score.size):
        if score[slot] == least:
            return slot
    return _NONE
