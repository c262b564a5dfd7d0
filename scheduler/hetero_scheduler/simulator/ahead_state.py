"""What a compiled replay with forecasts changes as it goes on: slots, scores, tasks, the link.

Numbers are arrays of one element, because compiled code changes arrays in place.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hetero_scheduler.simulator.ahead_script import NONE, Array, Rules, Script
from hetero_scheduler.slots import SlotState

COUNTED = (
    *("required", "hits", "late", "misses"),
    *("prefetches", "prefetches_used", "prefetches_wasted", "forecasts"),
)
"""Fields of Counts, in the order of `State.counts`; stalls are the link's."""
BEFORE_ALL = -2
"""A position before any."""


class Slots(NamedTuple):
    """What the slot machine keeps: `key`, `state` and `tag` by slot."""

    slot_of: Array
    """`[layers, experts]`"""
    key: Array
    state: Array
    tag: Array
    is_unproven: Array
    """`[layers, experts]`: prefetched, and not required since."""
    next_tag: Array
    num_available: Array
    """EMPTY and USED ones."""


class Scores(NamedTuple):
    """What probabilistic Belady keeps."""

    score: Array
    expected: Array
    recent: Array
    step: Array
    """By layer: the step after which its forecast was made; NONE for none."""
    behind: Array
    """By layer: entries of it that lie behind."""
    passes: Array


class Tasks(NamedTuple):
    """What a schedule keeps: a layer has the tasks of its next run, or none."""

    expert: Array
    """`[layers, per_layer]`, NONE for none."""
    confidence: Array
    deadline: Array
    """By layer."""


class Link(NamedTuple):
    """One-element arrays. `done_ms` is infinite while nothing is on the move."""

    now_ms: Array
    position: Array
    done_ms: Array
    key: Array
    slot: Array
    tag: Array
    began: Array
    """Position at which the copy began."""
    taken: Array
    """Positions a transfer, moving average."""
    current: Array
    """What the running layer has left of the budget."""
    pos: Array
    """Of that layer."""
    stall_ms: Array


class State(NamedTuple):
    """All of it. `counts`: see COUNTED."""

    slots: Slots
    scores: Scores
    tasks: Tasks
    link: Link
    counts: Array


def new_state(script: Script, rules: Rules, num_slots: int, per_layer: int) -> State:
    """An empty cache, nothing foreseen, and an idle link."""
    num_layers, num_experts = script.steps.shape[2:]
    by_expert = (num_layers, num_experts)
    slots = Slots(
        np.full(by_expert, NONE, np.int64),
        np.full(num_slots, NONE, np.int64),
        np.full(num_slots, int(SlotState.EMPTY), np.int64),
        np.zeros(num_slots, np.int64),
        np.zeros(by_expert, np.bool_),
        np.ones(1, np.int64),
        np.full(1, num_slots),
    )
    scores = Scores(
        np.full(by_expert, -np.inf),
        np.zeros(by_expert),
        np.zeros(by_expert),
        np.full(num_layers, NONE, np.int64),
        np.zeros(num_layers, np.int64),
        np.zeros(1, np.int64),
    )
    tasks = Tasks(
        np.full((num_layers, per_layer), NONE, np.int64),
        np.zeros((num_layers, per_layer)),
        np.full(num_layers, NONE, np.int64),
    )
    return State(slots, scores, tasks, _idle(rules), np.zeros(len(COUNTED), np.int64))


def _idle(rules: Rules) -> Link:
    return Link(
        now_ms=np.zeros(1),
        position=np.zeros(1),
        done_ms=np.full(1, np.inf),
        key=np.full(1, NONE, np.int64),
        slot=np.full(1, NONE, np.int64),
        tag=np.full(1, NONE, np.int64),
        began=np.zeros(1),
        taken=np.full(1, 1.0 / rules.budget),
        current=np.full(1, rules.budget),
        pos=np.full(1, BEFORE_ALL, np.int64),
        stall_ms=np.zeros(1),
    )
