"""The block selection of one layer, compiled; `block_reference.py` has the same decisions in plain Python."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from hetero_scheduler.compiled import compiled

_compiled = compiled(nogil=True, boundscheck=False)


@_compiled
def select_block(
    limits: Any, scores: Any, shares: Any, own: Any, weights: Any, resident: Any, experts: Any
) -> None:
    """Fill `experts` `[n, top_k]`. `limits`: growth, rerouting, rescue of the policy; the rest as for
    `BlockPool.select`, with `shares` `[n, E]` the softmax of `scores` and `resident` `[E]` the pool."""
    growth, rerouting, rescue = limits
    num_positions = len(own)
    demand = np.zeros(scores.shape[1], np.float64)
    for d in range(num_positions):
        for e in own[d]:
            demand[e] += weights[d] * shares[d, e]
    eligible = np.zeros(demand.size, np.bool_)
    for e in own[0]:
        eligible[e] = True
    ranked = _by_demand(demand, eligible)
    num_picked = _size(demand, ranked, growth)
    for e in ranked[:num_picked]:
        eligible[e] = True
    _prune(demand, ranked[:num_picked], resident, rerouting * _sum(demand), eligible)
    for d in range(num_positions):
        allowed = eligible.copy()
        if weights[d] >= rescue:
            allowed[_best(scores[d], own[d])] = True
        _choose(scores[d], own[d], allowed, experts[d])


@_compiled
def use(experts: Any, clock: Any, last_use: Any) -> None:
    """Experts `[T, top_k]` were executed in the steps after `clock`, a row a step. `last_use` `[E]`"""
    for position in range(len(experts)):
        for e in experts[position]:
            last_use[e] = clock + position + 1


@_compiled
def count_absent(experts: Any, resident: Any) -> Any:
    """Different ones of `experts` `[n, top_k]` that are not `resident` `[E]`."""
    is_counted, count = np.zeros(resident.size, np.bool_), 0
    for position in range(len(experts)):
        for e in experts[position]:
            count += not resident[e] and not is_counted[e]
            is_counted[e] = True
    return count


@_compiled
def count_foreign(experts: Any, own: Any) -> Any:
    """Experts of all positions that are not among their `own`. Both `[n, top_k]`."""
    count = 0
    for position in range(len(experts)):
        for e in experts[position]:
            is_own = False
            for each in own[position]:
                is_own = is_own or each == e
            count += not is_own
    return count


@_compiled
def _by_demand(demand: Any, is_root: Any) -> Any:
    """Experts that are wanted and not the root's, most wanted first, ties to the lowest."""
    ranked, count = np.empty(demand.size, np.int64), 0
    for e in range(demand.size):
        if demand[e] <= 0 or is_root[e]:
            continue
        place = count
        while place > 0 and demand[ranked[place - 1]] < demand[e]:
            ranked[place] = ranked[place - 1]
            place -= 1
        ranked[place] = e
        count += 1
    return ranked[:count]


@_compiled
def _size(demand: Any, ranked: Any, growth: Any) -> Any:
    """How many of `ranked` are eligible: `growth` times the effective number of them, rounded up."""
    total = 0.0
    for e in ranked:
        total += demand[e]
    entropy = 0.0
    for e in ranked:
        share = demand[e] / total
        entropy -= share * math.log(share)
    return min(math.ceil(growth * math.exp(entropy)), ranked.size)


@_compiled
def _prune(demand: Any, picked: Any, resident: Any, budget: Any, eligible: Any) -> None:
    """Leave out absent ones, least wanted first, while what they take away stays within `budget`."""
    taken = 0.0
    for i in range(picked.size - 1, -1, -1):
        e = picked[i]
        if resident[e]:
            continue
        taken += demand[e]
        if taken > budget:
            return
        eligible[e] = False


@_compiled
def _choose(scores: Any, own: Any, allowed: Any, experts: Any) -> None:
    """The best of `allowed`; where the router excludes too many of them, its own. Its own come first."""
    is_chosen, order = np.zeros(scores.size, np.bool_), np.empty(own.size, np.int64)
    num_chosen = 0
    while num_chosen < own.size:
        best = -1
        for e in range(scores.size):
            if not allowed[e] or is_chosen[e] or scores[e] == -np.inf:
                continue
            if best < 0 or scores[e] > scores[best]:
                best = e
        if best < 0:
            break
        is_chosen[best], order[num_chosen] = True, best
        num_chosen += 1
    for e in own:
        if num_chosen < own.size and not is_chosen[e]:
            is_chosen[e], order[num_chosen] = True, e
            num_chosen += 1
    _write(order, own, is_chosen, experts)


@_compiled
def _write(order: Any, own: Any, is_chosen: Any, experts: Any) -> None:
    """Those of `order` that are among the router's `own` in its order, then the others."""
    num_written = 0
    for e in own:
        if is_chosen[e]:
            experts[num_written] = e
            is_chosen[e] = False
            num_written += 1
    for e in order:
        if is_chosen[e]:
            experts[num_written] = e
            num_written += 1


@_compiled
def _best(scores: Any, own: Any) -> Any:
    """Of the router's own choice, ties to the one it names first."""
    best = own[0]
    for e in own:
        if scores[e] > scores[best]:
            best = e
    return best


@_compiled
def _sum(values: Any) -> Any:
    total = 0.0
    for value in values:
        total += value
    return total
