"""Algorithm 1 of PSR, compiled: the step that decode runs, and the scan that runs it over a prompt.

A layer's cache depends on the layer's own past alone, so a scan of one layer over all tokens and a scan of
one token over all layers meet the same states: a prompt is decided layer by layer, as the model computes it.

`reference.py` has the same decisions in plain Python.

Rounding: a moving average is (old + gain) * decay, and priorities are sums; no product is ever added to
anything, so a compiler that fuses multiply and add rounds like one that does not.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hetero_scheduler.compiled import compiled
from hetero_scheduler.routing.state import NOBODY

FAST_DECAY, SLOW_DECAY = np.float32(0.5), np.float32(0.98)
FAST_GAIN, SLOW_GAIN = np.float32(0.5 / 0.5), np.float32(0.02 / 0.98)
"""What one choice adds before the decay: (1 - decay) / decay."""
_UNIT = np.float32(1 / 256)
_compiled = compiled(nogil=True, boundscheck=False)


class Heard(NamedTuple):
    """What routers said, of `T` tokens and `n` layers from `first_layer` on."""

    scores: npt.NDArray[np.float32]
    """z, what the router takes its top-k of; -inf where it excludes an expert. `[T, n, E]`"""
    own: npt.NDArray[np.int64]
    """The router's own choice, from its best on where it says so. `[T, n, top_k]`"""
    guesses: npt.NDArray[np.float32]
    """The layer's router on the MoE input of the layer before, as `scores`. `[T, n, E]`, or `[0, 0, 0]` where
    nobody asked; row of layer 0: ignored."""
    prior_rows: npt.NDArray[np.int64]
    """By token. `[T]`"""


class Tables(NamedTuple):
    """What does not change during a request."""

    bonus: npt.NDArray[np.float32]
    """What residency adds to a score, for a fixed range. `[L]`"""
    prior: npt.NDArray[np.uint8]
    """In 256ths. `[N + 1, L, E]`"""


class Decided(NamedTuple):
    """Filled by a scan."""

    experts: npt.NDArray[np.int64]
    """To execute: the router's own choices that are kept in their order, then the others from the best on.
    `[T, n, top_k]`"""
    inserted: npt.NDArray[np.int32]
    """Experts that the pre-gate brought into the logical cache. `[T, n]`"""
    demanded: npt.NDArray[np.int32]
    """Experts executed that were not in it. `[T, n]`"""
    deviating: npt.NDArray[np.int32]
    """Experts executed that the router would not have chosen. `[T, n]`"""


@_compiled
def scan(rules: Any, tables: Any, state: Any, first_layer: Any, heard: Any, decided: Any) -> None:
    """Decide all of `heard`, a token at a time in layer order. `decided` is filled, `state` goes on."""
    num_tokens, num_layers, _ = heard.scores.shape
    for t in range(num_tokens):
        for i in range(num_layers):
            layer = first_layer + i
            prior = tables.prior[heard.prior_rows[t], layer]
            if layer > 0 and heard.guesses.size > 0:
                steer(rules, state, layer, heard.guesses[t, i], prior)
            _begin(rules, state, layer, prior)
            decided.inserted[t, i] = _count(state.is_inserted[layer])
            bonus = _bonus(rules, tables, state, layer, heard.scores[t, i])
            _select(rules, state, layer, heard.scores[t, i], heard.own[t, i], bonus, decided.experts[t, i])
            decided.demanded[t, i] = _demand(state, layer, decided.experts[t, i])
            decided.deviating[t, i] = _count_foreign(decided.experts[t, i], heard.own[t, i])
            _finish(rules, state, layer, heard.own[t, i], decided.experts[t, i])


@_compiled
def steer(rules: Any, state: Any, layer: Any, guess: Any, prior: Any) -> None:
    """Part 1 for `layer`: visit the best of `guess` `[E]`, insert at most `rules.insertions`."""
    _begin(rules, state, layer, prior)
    resident, guarded = state.is_resident[layer], state.is_guarded[layer]
    top_k, num_new = state.guess.shape[1], 0
    is_barred, place = np.empty(guess.size, np.bool_), np.zeros(guess.size, np.int64)
    for e in range(guess.size):
        is_barred[e] = guess[e] == -np.inf
    ranking = np.empty(max(rules.window, top_k), np.int64)
    for rank in range(_rank(guess, guess, place, is_barred, ranking)):
        expert = ranking[rank]
        if rank < top_k:
            state.guess[layer, rank] = expert
        if rank >= rules.window:
            continue
        if resident[expert]:
            guarded[expert] = True
        elif num_new < rules.insertions:
            victim = _least(state.priority[layer], resident, guarded, guarded)
            if victim != NOBODY:
                resident[victim] = False
                resident[expert] = guarded[expert] = state.is_inserted[layer, expert] = True
                num_new += 1


@_compiled
def _begin(rules: Any, state: Any, layer: Any, prior: Any) -> None:
    """Fix the priorities of this step."""
    if state.is_begun[layer]:
        return
    state.is_begun[layer] = True
    priority, last_use = state.priority[layer], state.last_use[layer]
    fast, slow = state.fast[layer], state.slow[layer]
    if rules.is_lru:
        for e in range(priority.size):
            priority[e] = np.float32(last_use[e])
    else:
        for e in range(priority.size):
            priority[e] = (fast[e] + slow[e]) + np.float32(prior[e]) * _UNIT  # exact: 256ths


@_compiled
def _bonus(rules: Any, tables: Any, state: Any, layer: Any, scores: Any) -> Any:
    """What residency adds to a score of this step."""
    if not rules.is_running:
        return tables.bonus[layer]
    least, most = np.inf, -np.inf
    for score in scores:
        if score != -np.inf:
            least, most = min(least, score), max(most, score)
    state.range_sum[layer] += most - least
    return np.float32(rules.bonus * (state.range_sum[layer] / (state.clock[layer] + 1)))


@_compiled
def _select(rules: Any, state: Any, layer: Any, scores: Any, own: Any, bonus: Any, experts: Any) -> None:
    """Part 2, first half: fill `experts`, the router's kept ones first."""
    num_experts, top_k = scores.size, own.size
    place = np.empty(num_experts, np.int64)  # in the router's own choice
    for e in range(num_experts):
        place[e] = top_k
    for k in range(top_k):
        place[own[k]] = k
    is_chosen = np.zeros(num_experts, np.bool_)
    if rules.executes_guess and state.guess[layer, top_k - 1] != NOBODY:
        for k in range(top_k):
            is_chosen[state.guess[layer, k]] = True
    else:
        is_barred, is_favoured = np.zeros(num_experts, np.bool_), np.zeros(num_experts, np.bool_)
        for e in range(num_experts):
            is_barred[e] = scores[e] == -np.inf and place[e] == top_k
        _mark_best(rules.protected, scores, scores, place, is_barred, is_favoured)
        biased = np.empty(num_experts, np.float32)
        for e in range(num_experts):
            biased[e] = scores[e] + bonus if is_favoured[e] or state.is_resident[layer, e] else scores[e]
        _mark_best(top_k, biased, scores, place, is_barred, is_chosen)
    _write_in_order(is_chosen, scores, place, own, experts)


@_compiled
def _mark_best(count: Any, biased: Any, scores: Any, place: Any, is_barred: Any, is_marked: Any) -> None:
    """Mark the best `count` of what is not barred: what the router excludes, and did not choose itself."""
    if count == 0:
        return
    ranking = np.empty(count, np.int64)
    for k in range(_rank(biased, scores, place, is_barred, ranking)):
        is_marked[ranking[k]] = True


@_compiled
def _write_in_order(is_chosen: Any, scores: Any, place: Any, own: Any, experts: Any) -> None:
    num_kept, is_barred = 0, np.empty(scores.size, np.bool_)
    for e in own:
        if is_chosen[e]:
            experts[num_kept] = e
            num_kept += 1
    if num_kept == own.size:
        return
    for e in range(is_barred.size):
        is_barred[e] = not is_chosen[e] or place[e] < own.size
    _rank(scores, scores, place, is_barred, experts[num_kept:])


@_compiled
def _demand(state: Any, layer: Any, experts: Any) -> Any:
    """Part 2, second half: what is executed becomes resident. How many were not."""
    resident, num_demanded = state.is_resident[layer], 0
    is_chosen = np.zeros(resident.size, np.bool_)
    for e in experts:
        is_chosen[e] = True
    for e in range(resident.size):
        if not is_chosen[e] or resident[e]:
            continue
        victim = _least(state.priority[layer], resident, is_chosen, state.is_guarded[layer])
        if victim == NOBODY:
            victim = _least(state.priority[layer], resident, is_chosen, is_chosen)
        resident[victim] = False
        resident[e] = True
        num_demanded += 1
    return num_demanded


@_compiled
def _finish(rules: Any, state: Any, layer: Any, own: Any, experts: Any) -> None:
    """The statistics of the layer; the step is over."""
    state.clock[layer] += 1
    if rules.is_lru:
        for e in experts:
            state.last_use[layer, e] = state.clock[layer]
        for e in range(state.last_use.shape[1]):
            if state.is_inserted[layer, e]:
                state.last_use[layer, e] = state.clock[layer]
    else:
        fast, slow = state.fast[layer], state.slow[layer]
        for e in own:
            fast[e] += FAST_GAIN
            slow[e] += SLOW_GAIN
        for e in range(fast.size):
            fast[e] *= FAST_DECAY
            slow[e] *= SLOW_DECAY
    for e in range(state.is_guarded.shape[1]):
        state.is_guarded[layer, e] = state.is_inserted[layer, e] = False
    for k in range(own.size):
        state.guess[layer, k] = NOBODY
    state.is_begun[layer] = False


@_compiled
def _rank(biased: Any, scores: Any, place: Any, is_barred: Any, ranking: Any) -> Any:
    """Fill `ranking` with the best of what is not barred, the best first; how many there are.

    By `biased`, ties by the router's own ranking (score, place, index). Sorts as it reads; most experts are
    below the worst that is kept, and done with at one look.
    """
    kept, num_kept, worst = np.empty(ranking.size, np.float32), 0, np.float32(-np.inf)
    for e in range(biased.size):
        value = biased[e]
        if (num_kept == ranking.size and value < worst) or is_barred[e]:
            continue
        k = num_kept
        while k > 0:
            other = ranking[k - 1]
            if value < kept[k - 1]:
                break
            if value == kept[k - 1] and (
                scores[e] < scores[other] or (scores[e] == scores[other] and place[e] >= place[other])
            ):
                break
            if k < ranking.size:
                ranking[k], kept[k] = other, kept[k - 1]
            k -= 1
        if k < ranking.size:
            ranking[k], kept[k] = e, value
            num_kept = min(num_kept + 1, ranking.size)
            worst = kept[num_kept - 1]
    return num_kept


@_compiled
def _least(priority: Any, resident: Any, kept: Any, guarded: Any) -> Any:
    """The resident expert of least priority that is neither kept nor guarded, ties to the lowest."""
    least = NOBODY
    for e in range(priority.size):
        is_candidate = resident[e] and not kept[e] and not guarded[e]
        if is_candidate and (least == NOBODY or priority[e] < priority[least]):
            least = e
    return least


@_compiled
def _count(is_so: Any) -> Any:
    count = 0
    for each in is_so:
        count += each
    return count


@_compiled
def _count_foreign(experts: Any, own: Any) -> Any:
    num_foreign = 0
    for e in experts:
        is_own = False
        for each in own:
            is_own = is_own or each == e
        num_foreign += not is_own
    return num_foreign
