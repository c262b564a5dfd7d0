"""What a compiled replay with forecasts is given: rules, and a script that no cache changes."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hetero_scheduler.eviction.belady_forecast import DECAY, NUM_STEPS, RECENT_RATE, RECENT_WEIGHT
from hetero_scheduler.prefetch.jsd import SHORTEST_TRANSFER, SMOOTHING
from hetero_scheduler.simulator.foreseen import Foreseen
from hetero_scheduler.simulator.scenario import Scenario
from hetero_scheduler.trace import Trace

Array = npt.NDArray[Any]
SCHEDULES = ("none", "jsd", "moe_infinity")
NONE = -1


class Rules(NamedTuple):
    """Policies and times, as numbers. `schedule`: its place in SCHEDULES."""

    schedule: int
    lead: int
    budget: float
    """Transfers a layer-time, before any has landed."""
    smoothing: float
    shortest: float
    """Positions; of a transfer, at least."""
    layer_ms: float
    record_ms: float
    forecast_ms: float
    overtakes: bool
    recent_weight: float
    recent_rate: float
    weights: Array
    """Of a forecast's coming steps, float64 `[horizon]`, the nearest first; 0 beyond what counts."""


class Likeliest(NamedTuple):
    """The experts that make tasks, by forecast, NONE where there is none. `[tokens, layers, per_layer]`"""

    expert: Array
    confidence: Array


class Script(NamedTuple):
    """What happens, whatever the cache does. `needed` ascends along its last axis."""

    needed: Array
    is_first: Array
    group_start: Array
    """By layer: the first layer of the group that it completes, or NONE."""
    steps: Array
    known: Array
    """Of no token, where nothing is said."""
    early: Array
    of_steps: Likeliest
    of_known: Likeliest
    of_early: Likeliest


def can_replay(scenario: Scenario) -> bool:
    """Whether the compiled replay knows these policies and this link."""
    return (
        scenario.eviction == "belady"
        and scenario.schedule in SCHEDULES
        and scenario.pool == "global"
        and scenario.machine.copies_in_flight == 1
    )


def rules_of(scenario: Scenario, foreseen: Foreseen) -> Rules:
    """The numbers behind the names of `scenario`. Raises ValueError for a schedule that is not compiled."""
    machine, horizon = scenario.machine, foreseen.steps.shape[1]
    weights = np.where(np.arange(horizon) < NUM_STEPS, DECAY ** np.arange(horizon, dtype=np.float64), 0.0)
    return Rules(
        SCHEDULES.index(scenario.schedule),
        1 if foreseen.asks_early else 2,
        machine.layer_ms / machine.record_ms,
        SMOOTHING,
        SHORTEST_TRANSFER,
        machine.layer_ms,
        machine.record_ms,
        machine.forecast_ms,
        machine.overtakes,
        RECENT_WEIGHT,
        RECENT_RATE,
        weights,
    )


def script_of(trace: Trace, foreseen: Foreseen, per_layer: int) -> Script:
    """What `trace` needs and `foreseen` says. `per_layer`: tasks of a layer, at most."""
    nothing = np.zeros((0, trace.num_layers, trace.num_experts), np.float32)
    known = nothing if foreseen.known is None else foreseen.known
    early = nothing if foreseen.early is None else foreseen.early
    group_start = np.full(trace.num_layers, NONE, np.int64)
    for group in foreseen.groups:
        group_start[group.stop - 1] = group.start
    return Script(
        np.sort(trace.topk, axis=-1).astype(np.int64),
        foreseen.is_first,
        group_start,
        foreseen.steps,
        known,
        early,
        _likeliest(foreseen.steps[:, 0], per_layer),
        _likeliest(known, per_layer),
        _likeliest(early, per_layer),
    )


def _likeliest(shares: Array, per_layer: int) -> Likeliest:
    """As `propose` finds them, for all tokens at once."""
    expert = np.argsort(-shares, axis=-1, kind="stable")[..., :per_layer]
    confidence = np.take_along_axis(shares, expert, axis=-1).astype(np.float64)
    return Likeliest(np.where(confidence > 0, expert, NONE), confidence)
