"""One scenario on one trace, by the compiled replay where it can, by the reference otherwise."""

from __future__ import annotations

import numpy as np

from hetero_scheduler.predict import Predictor
from hetero_scheduler.simulator.ahead_script import can_replay
from hetero_scheduler.simulator.fast import replay_cache
from hetero_scheduler.simulator.fast_ahead import replay_ahead
from hetero_scheduler.simulator.foreseen import Foreseen
from hetero_scheduler.simulator.policies import check_names, make_policies, needs_forecast
from hetero_scheduler.simulator.replay import Replay
from hetero_scheduler.simulator.result import Counts, SimulationResult, static_hit_rate
from hetero_scheduler.simulator.scenario import Scenario, pool_ranges
from hetero_scheduler.simulator.use_scores import FAST_POLICIES, use_scores
from hetero_scheduler.slots import SlotMachine
from hetero_scheduler.trace import Trace, count_uses, load_entropies


def simulate(
    trace: Trace, scenario: Scenario, *, predictor: Predictor | None = None, is_reference: bool = False
) -> SimulationResult:
    """Replay `trace` under `scenario`.

    `predictor`: a trained one, which is what the scenario's name for it then means; with `Foreseen` around
    it the replay is compiled where it can be. `is_reference`: never the compiled replay. Raises ValueError
    for an unknown policy, policies that cannot work together, a residency too small for one layer of a token,
    and a trace without a token.
    """
    check_names(scenario, is_trained=predictor is not None)
    first = int(trace.num_tokens * scenario.uncounted)
    if first >= trace.num_tokens:
        raise ValueError("the trace holds no token; record a longer one")
    slots = scenario.layer_slots(
        num_layers=trace.num_layers, num_experts=trace.num_experts, top_k=trace.top_k
    )
    is_cache_only = scenario.eviction in FAST_POLICIES and not needs_forecast(scenario)
    if is_cache_only and not is_reference:
        counts = _count_cache_only(trace, scenario, slots, first)
    elif isinstance(predictor, Foreseen) and can_replay(scenario) and not is_reference:
        counts = replay_ahead(trace, predictor, scenario, num_slots=sum(slots), first_counted=first)
    else:
        counts = _count_by_reference(trace, scenario, slots, first, predictor)
    load = count_uses(trace.topk[first:], trace.num_experts)
    return SimulationResult(
        scenario=scenario,
        tokens=trace.num_tokens - first,
        num_layers=trace.num_layers,
        num_slots=sum(slots),
        counts=counts,
        static_hit_rate=static_hit_rate(load, pool_ranges(slots, scenario.pool)),
        load_entropy=float(load_entropies(load).mean()),
    )


def _count_cache_only(trace: Trace, scenario: Scenario, slots: list[int], first: int) -> Counts:
    """Without prefetches the link is idle when a layer demands: each miss stalls for one transfer."""
    needed = np.sort(trace.topk, axis=-1).astype(np.int32)
    scores = use_scores(scenario.eviction, needed, num_experts=trace.num_experts)
    pools = pool_ranges(slots, scenario.pool)
    is_hit = replay_cache(needed, scores, pools, num_experts=trace.num_experts).is_hit[first:]
    hits, misses = int(np.count_nonzero(is_hit)), int(np.count_nonzero(~is_hit))
    stall_ms = misses * scenario.machine.record_ms
    return Counts(required=is_hit.size, hits=hits, misses=misses, stall_ms=stall_ms)


def _count_by_reference(
    trace: Trace, scenario: Scenario, slots: list[int], first: int, predictor: Predictor | None
) -> Counts:
    machine = SlotMachine(
        sum(slots),
        num_layers=trace.num_layers,
        num_experts=trace.num_experts,
        layer_slots=slots if scenario.pool == "per_layer" else None,
    )
    policies = make_policies(trace, scenario, predictor)
    return Replay(trace, slots=machine, policies=policies, machine=scenario.machine).run(first)
