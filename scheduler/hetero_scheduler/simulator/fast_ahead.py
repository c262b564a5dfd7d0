"""Replays with forecasts, compiled: a token of 48 layers × 128 experts in one or two milliseconds.

For probabilistic Belady in one pool, with JSD or MoE-Infinity or without prefetches, over forecasts that were
made before (`Foreseen`), and a link that holds one prefetch at a time. The kernel makes the decisions of
`Replay` in the same order and with the same arithmetic; the tests hold each count to it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hetero_scheduler.compiled import compiled
from hetero_scheduler.simulator.ahead_script import NONE, SCHEDULES, can_replay, rules_of, script_of
from hetero_scheduler.simulator.ahead_state import BEFORE_ALL, COUNTED, new_state
from hetero_scheduler.simulator.foreseen import Foreseen
from hetero_scheduler.simulator.result import Counts
from hetero_scheduler.simulator.scenario import Scenario
from hetero_scheduler.slots import SlotState
from hetero_scheduler.trace import Trace

_NONE, _BEFORE_ALL = NONE, BEFORE_ALL
_JSD = SCHEDULES.index("jsd")
_EMPTY, _FETCH = int(SlotState.EMPTY), int(SlotState.FETCH)
_COMPUTE, _USED = int(SlotState.COMPUTE), int(SlotState.USED)
_REQUIRED, _HITS, _LATE, _MISSES, _PREFETCHES, _PROVEN, _WASTED, _FORECASTS = range(len(COUNTED))


def replay_ahead(
    trace: Trace, foreseen: Foreseen, scenario: Scenario, *, num_slots: int, first_counted: int
) -> Counts:
    """Counts of the tokens from `first_counted` on. `scenario`: one that `can_replay`."""
    assert can_replay(scenario), f"the compiled replay does not know {scenario}"
    per_layer = min(trace.top_k + scenario.extra, trace.num_experts)
    rules, script = rules_of(scenario, foreseen), script_of(trace, foreseen, per_layer)
    state = new_state(script, rules, num_slots, per_layer)
    before = np.zeros(len(COUNTED) + 1)
    _replay(script, rules, state, first_counted, before)
    counted = state.counts - before[:-1].astype(np.int64)
    stall_ms = float(state.link.stall_ms[0] - before[-1])
    return Counts(**dict(zip(COUNTED, counted.tolist(), strict=True)), stall_ms=stall_ms)


# ---- the loop


@compiled(nogil=True)
def _replay(script: Any, rules: Any, state: Any, first_counted: Any, before: Any) -> None:
    num_tokens, num_layers, _ = script.needed.shape
    for step in range(num_tokens):
        if step == first_counted:
            before[:-1] = state.counts
            before[-1] = state.link.stall_ms[0]
        if script.is_first[step]:
            state.tasks.expert[:] = _NONE
            state.link.pos[0] = _BEFORE_ALL
        elif len(script.known):
            _begin_step(script, rules, state, step)
        for layer in range(num_layers):
            pos = step * num_layers + layer
            state.link.position[0] = pos
            _arrive(rules, state, state.link.now_ms[0])
            _run_scores(script, rules, state.scores, step, layer)
            _wait_for(script, rules, state, step, layer)
            _listen(script, rules, state, step, layer)
            _prefetch_until(script, rules, state, step, layer)


@compiled(nogil=True)
def _begin_step(script: Any, rules: Any, state: Any, step: Any) -> None:
    num_layers = script.needed.shape[1]
    state.counts[_FORECASTS] += 1
    state.link.now_ms[0] += rules.forecast_ms
    for layer in range(num_layers):
        _rescore(script, rules, state.scores, layer, script.known[step, layer])
        _propose(script.of_known, state.tasks, step, layer, step * num_layers + layer)
    _arrive(rules, state, state.link.now_ms[0])
    while state.link.done_ms[0] == np.inf and _start_next(script, rules, state, step, _NONE):
        pass


@compiled(nogil=True)
def _listen(script: Any, rules: Any, state: Any, step: Any, layer: Any) -> None:
    """What the predictor says anew once `layer` has routed, and once the next router was asked."""
    num_layers = script.needed.shape[1]
    start = script.group_start[layer]
    if start != _NONE:
        state.counts[_FORECASTS] += 1
        state.link.now_ms[0] += rules.forecast_ms
        for covered in range(start, layer + 1):
            state.scores.step[covered] = step
            state.scores.behind[covered] = 0
            _rescore(script, rules, state.scores, covered, script.steps[step, 0, covered])
            _propose(script.of_steps, state.tasks, step, covered, (step + 1) * num_layers + covered)
    following = layer + 1
    if len(script.early) and not script.is_first[step] and following < num_layers:
        state.counts[_FORECASTS] += 1
        state.link.now_ms[0] += rules.forecast_ms
        _rescore(script, rules, state.scores, following, script.early[step, following])
        _propose(script.of_early, state.tasks, step, following, step * num_layers + following)


@compiled(nogil=True)
def _propose(likeliest: Any, tasks: Any, step: Any, layer: Any, deadline: Any) -> None:
    tasks.expert[layer] = likeliest.expert[step, layer]
    tasks.confidence[layer] = likeliest.confidence[step, layer]
    tasks.deadline[layer] = deadline


# ---- eviction scores


@compiled(nogil=True)
def _run_scores(script: Any, rules: Any, scores: Any, step: Any, layer: Any) -> None:
    """`layer` runs: its forecast moves on."""
    scores.passes[0] += 1
    needed = script.needed[step, layer]
    moved = min(len(needed) * rules.recent_rate, 1.0)
    share = np.zeros(scores.score.shape[1])
    for expert in needed:
        share[expert] = 1.0 / len(needed)
    for expert in range(len(share)):
        scores.recent[layer, expert] += moved * (share[expert] - scores.recent[layer, expert])
    if scores.step[layer] == _NONE:
        for expert in needed:
            if scores.score[layer, expert] < 0:
                scores.score[layer, expert] = -1.0 / scores.passes[0]
        return
    scores.behind[layer] += 1
    behind = scores.behind[layer]
    if behind < script.steps.shape[1]:
        _rescore(script, rules, scores, layer, script.steps[scores.step[layer], behind, layer])
    else:
        _add_up(rules, scores, layer)


@compiled(nogil=True)
def _rescore(script: Any, rules: Any, scores: Any, layer: Any, now: Any) -> None:
    """Σ λ^j · p_j / Σ λ^j, with `now` for the nearest entry and the forecast's own for the others."""
    ahead = script.steps[scores.step[layer]]
    behind = scores.behind[layer]
    num_left = len(ahead) - behind
    total = rules.weights[:num_left].sum()
    for expert in range(len(now)):
        expected = rules.weights[0] * now[expert]
        for j in range(1, num_left):
            expected += rules.weights[j] * ahead[behind + j, layer, expert]
        scores.expected[layer, expert] = expected / total
    _add_up(rules, scores, layer)


@compiled(nogil=True)
def _add_up(rules: Any, scores: Any, layer: Any) -> None:
    for expert in range(scores.score.shape[1]):
        recent = rules.recent_weight * scores.recent[layer, expert]
        scores.score[layer, expert] = scores.expected[layer, expert] + recent


# ---- slots


@compiled(nogil=True)
def _take_slot(slots: Any, score: Any, layer: Any, needed: Any) -> Any:
    """An EMPTY slot, or the USED one of least score that holds none of `needed` of `layer`; -1 for none."""
    num_experts = score.shape[1]
    chosen, least = _NONE, np.inf
    for slot in range(len(slots.key)):
        if slots.state[slot] == _EMPTY:
            return slot
        if slots.state[slot] == _USED:
            held_layer, expert = divmod(slots.key[slot], num_experts)
            if score[held_layer, expert] < least:
                is_protected = False
                if held_layer == layer:
                    for other in needed:
                        is_protected |= other == expert
                if not is_protected:
                    chosen, least = slot, score[held_layer, expert]
    return chosen


@compiled(nogil=True)
def _fill(state: Any, slot: Any, layer: Any, expert: Any, to: Any) -> None:
    """`slot` is for this expert from now on; whom it held has left."""
    slots, num_experts = state.slots, state.slots.slot_of.shape[1]
    if slots.state[slot] == _USED:
        _forget(state, slots.key[slot] // num_experts, slots.key[slot] % num_experts)
    slots.num_available[0] -= 1
    slots.state[slot], slots.key[slot] = to, layer * num_experts + expert
    slots.slot_of[layer, expert] = slot
    slots.tag[slot] = slots.next_tag[0]
    slots.next_tag[0] += 1


@compiled(nogil=True)
def _forget(state: Any, layer: Any, expert: Any) -> None:
    state.slots.slot_of[layer, expert] = _NONE
    if state.slots.is_unproven[layer, expert]:
        state.counts[_WASTED] += 1
        state.slots.is_unproven[layer, expert] = False


@compiled(nogil=True)
def _release(slots: Any, layer: Any) -> None:
    for slot in slots.slot_of[layer]:
        if slot != _NONE and slots.state[slot] == _COMPUTE:
            slots.state[slot] = _USED
            slots.num_available[0] += 1


# ---- the link


@compiled(nogil=True)
def _arrive(rules: Any, state: Any, now_ms: Any) -> None:
    """Take the copy that has arrived by `now_ms`, if there is one."""
    link, slots = state.link, state.slots
    if link.done_ms[0] > now_ms or link.done_ms[0] == np.inf:
        return
    link.done_ms[0] = np.inf
    slot = link.slot[0]
    if slots.tag[slot] == link.tag[0] and slots.state[slot] == _FETCH:
        slots.state[slot] = _COMPUTE
    taken = max(link.position[0] - link.began[0], rules.shortest)
    link.taken[0] += rules.smoothing * (taken - link.taken[0])


@compiled(nogil=True)
def _wait_for(script: Any, rules: Any, state: Any, step: Any, layer: Any) -> None:
    """Count, give up what comes too late for nothing, load what is missing, and stall for it."""
    slots, link, needed = state.slots, state.link, script.needed[step, layer]
    num_late = num_missing = 0
    for expert in needed:
        slot = slots.slot_of[layer, expert]
        num_missing += slot == _NONE
        num_late += slot != _NONE and slots.state[slot] == _FETCH
        state.counts[_PROVEN] += slots.is_unproven[layer, expert]
        slots.is_unproven[layer, expert] = False
    state.counts[_REQUIRED] += len(needed)
    state.counts[_HITS] += len(needed) - num_late - num_missing
    state.counts[_LATE] += num_late
    state.counts[_MISSES] += num_missing
    if not num_late:
        _give_up(state, layer)
    _release(slots, layer)
    for expert in needed:
        if slots.slot_of[layer, expert] == _NONE:
            slot = _take_slot(slots, state.scores.score, layer, needed)
            assert slot != _NONE, "no slot can be freed for a layer's experts"
            _fill(state, slot, layer, expert, _COMPUTE)
    if num_missing or num_late:
        demanded_ms = num_missing * rules.record_ms
        if link.done_ms[0] == np.inf or (rules.overtakes and not num_late):
            done_ms = link.now_ms[0] + demanded_ms
            link.done_ms[0] += demanded_ms
        else:
            done_ms = link.done_ms[0] + demanded_ms
            _arrive(rules, state, done_ms)
        link.stall_ms[0] += done_ms - link.now_ms[0]
        link.now_ms[0] = done_ms
    _release(slots, layer)


@compiled(nogil=True)
def _give_up(state: Any, layer: Any) -> None:
    """`layer` runs without what is on the link for it: the slot is free, the copy goes on."""
    slots, link, num_experts = state.slots, state.link, state.slots.slot_of.shape[1]
    slot = link.slot[0]
    if link.done_ms[0] == np.inf or link.key[0] // num_experts != layer:
        return
    if slots.tag[slot] == link.tag[0] and slots.state[slot] == _FETCH:
        slots.state[slot] = _EMPTY
        slots.key[slot] = _NONE
        slots.num_available[0] += 1
        _forget(state, layer, link.key[0] % num_experts)


@compiled(nogil=True)
def _prefetch_until(script: Any, rules: Any, state: Any, step: Any, layer: Any) -> None:
    """The layer's time goes by; whenever the link has room, the schedule says what it carries next."""
    link = state.link
    begin_ms, pos = link.now_ms[0], step * script.needed.shape[1] + layer
    end_ms = begin_ms + rules.layer_ms
    while rules.schedule != 0:
        while link.done_ms[0] == np.inf and _start_next(script, rules, state, step, layer):
            pass
        if link.done_ms[0] >= end_ms:
            break
        link.now_ms[0] = link.done_ms[0]
        link.position[0] = pos + (link.now_ms[0] - begin_ms) / (end_ms - begin_ms)
        _arrive(rules, state, link.now_ms[0])
    link.now_ms[0], link.position[0] = end_ms, pos + 1.0


@compiled(nogil=True)
def _start_next(script: Any, rules: Any, state: Any, step: Any, layer: Any) -> Any:
    """Start what the schedule says while `layer` runs, -1: none yet. False when it says nothing."""
    slots, link, tasks = state.slots, state.link, state.tasks
    num_layers, top_k = script.needed.shape[1:]
    if rules.schedule == 0 or slots.num_available[0] <= top_k:
        return False
    pos = step * num_layers + layer
    if rules.schedule == _JSD:
        chosen, index = _choose_jsd(tasks, slots.slot_of, link, pos, rules.lead)
    else:
        chosen, index = _choose_moe_infinity(tasks, slots.slot_of, pos, rules.lead)
    if chosen == _NONE:
        return False
    expert = tasks.expert[chosen, index]
    tasks.expert[chosen, index] = _NONE
    slot = _take_slot(slots, state.scores.score, layer, script.needed[step, layer])
    if slot != _NONE:
        _fill(state, slot, chosen, expert, _FETCH)
        link.done_ms[0] = link.now_ms[0] + rules.record_ms
        link.key[0], link.slot[0], link.tag[0] = slots.key[slot], slot, slots.tag[slot]
        link.began[0] = link.position[0]
        slots.is_unproven[chosen, expert] = True
        state.counts[_PREFETCHES] += 1
    return True


# ---- schedules


@compiled(nogil=True)
def _choose_jsd(tasks: Any, slot_of: Any, link: Any, pos: Any, lead: Any) -> Any:
    """(layer, index) of the task that Algorithm 1 selects, found as `hetero_gpu.foresight.jsd` does."""
    average = 1.0 / link.taken[0]
    if pos != link.pos[0]:
        link.pos[0], link.current[0] = pos, average
    num_layers = len(tasks.deadline)
    for due in range(pos + lead, pos + num_layers + 1):
        layer = due % num_layers
        if tasks.deadline[layer] == due:
            index = _best(tasks, slot_of, layer)
            times = (pos, lead, due)
            if index != _NONE and _is_kept(tasks, slot_of, link, times, tasks.confidence[layer, index]):
                link.current[0] -= 1.0
                return layer, index
    return _NONE, _NONE


@compiled(nogil=True)
def _best(tasks: Any, slot_of: Any, layer: Any) -> Any:
    """The most confident task of a layer whose expert holds no slot, the lowest expert of several."""
    best = _NONE
    for index in range(tasks.expert.shape[1]):
        expert = tasks.expert[layer, index]
        if expert != _NONE and slot_of[layer, expert] == _NONE:
            if best == _NONE:
                best = index
            gain = tasks.confidence[layer, index] - tasks.confidence[layer, best]
            if gain > 0 or (gain == 0 and expert < tasks.expert[layer, best]):
                best = index
    return best


@compiled(nogil=True)
def _is_kept(tasks: Any, slot_of: Any, link: Any, times: Any, confidence: Any) -> Any:
    """Whether the greedy choice keeps the best task that is due at `times[2]`."""
    pos, lead, due = times
    average, num_layers = 1.0 / link.taken[0], len(tasks.deadline)
    least = 0.0 if lead == 1 and average >= 1.0 else 1.0
    num_held = 0
    for deadline in range(pos + lead, pos + num_layers + 1):
        capacity = max(least, link.current[0]) + average * (deadline - pos - 1)
        layer = deadline % num_layers
        if tasks.deadline[layer] == deadline and deadline != due:
            for index in range(tasks.expert.shape[1]):
                expert = tasks.expert[layer, index]
                if expert != _NONE and slot_of[layer, expert] == _NONE:
                    gain = tasks.confidence[layer, index] - confidence
                    num_held += gain > 0 or (gain == 0 and deadline < due)
        if deadline < due:
            num_held = min(num_held, int(capacity))
        elif num_held + 1 > capacity:
            return False
    return True


@compiled(nogil=True)
def _choose_moe_infinity(tasks: Any, slot_of: Any, pos: Any, lead: Any) -> Any:
    """(layer, index) of the greatest discounted confidence."""
    num_layers = len(tasks.deadline)
    greatest, chosen, index = -1.0, _NONE, _NONE
    for due in range(pos + lead, pos + num_layers + 1):
        layer = due % num_layers
        best = _best(tasks, slot_of, layer) if tasks.deadline[layer] == due else _NONE
        if best != _NONE:
            worth = tasks.confidence[layer, best] * (1.0 - (due - pos) / (num_layers + 1))
            if worth > greatest:
                greatest, chosen, index = worth, layer, best
    return chosen, index
