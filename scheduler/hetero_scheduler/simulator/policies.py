"""The policies that a scenario names, made for a trace: the engine's own, and oracles that only replay."""

from __future__ import annotations

from hetero_scheduler.eviction import EVICTION_POLICIES, FORECAST_POLICIES, EvictionPolicy, make_eviction
from hetero_scheduler.eviction.oracle import ORACLES, make_oracle
from hetero_scheduler.predict import Predictor, RouterShape, make_predictor
from hetero_scheduler.prefetch import SCHEDULES, make_schedule
from hetero_scheduler.simulator.replay import Policies
from hetero_scheduler.simulator.scenario import Scenario
from hetero_scheduler.trace import Trace

EVICTIONS = EVICTION_POLICIES + FORECAST_POLICIES + ORACLES
PREDICTORS = ("none", "frequency", "persistence", "oracle", "oracle_next")
"""`oracle` knows eight steps beyond the next one, `oracle_next` the next one only."""


def check_names(scenario: Scenario, *, is_trained: bool = False) -> None:
    """Raise ValueError for a policy that is none, and for policies that cannot work together.

    `is_trained`: a trained predictor is at hand, so the scenario need not name one of PREDICTORS.
    """
    kinds = {"eviction": EVICTIONS, "schedule": ("none", *SCHEDULES), "predictor": PREDICTORS}
    for kind, known in kinds.items():
        name = getattr(scenario, kind)
        if name not in known and not (kind == "predictor" and is_trained):
            raise ValueError(f"unknown {kind} {name!r}; known: {', '.join(known)}")
    if scenario.predictor == "none" and needs_forecast(scenario):
        raise ValueError(
            f"eviction {scenario.eviction!r} with schedule {scenario.schedule!r} acts on forecasts; choose a "
            f"predictor: {', '.join(PREDICTORS[1:])}"
        )


def needs_forecast(scenario: Scenario) -> bool:
    """Whether anything in `scenario` listens to a predictor."""
    return scenario.schedule != "none" or scenario.eviction in FORECAST_POLICIES


def make_eviction_for(name: str, trace: Trace) -> EvictionPolicy:
    """The eviction policy called `name`. Raises ValueError for a name that is none."""
    if name in ORACLES:
        return make_oracle(name, trace)
    return make_eviction(name, num_layers=trace.num_layers, num_experts=trace.num_experts)


def make_predictor_for(name: str, trace: Trace) -> Predictor:
    """The predictor called `name`, with nothing seen yet. Raises ValueError for a name that is none."""
    shape = RouterShape(trace.num_layers, trace.num_experts, trace.top_k)
    num_groups = min(2, trace.num_layers)
    if name == "oracle_next":
        from hetero_scheduler.predict.oracle import Oracle

        return Oracle(trace, num_groups=num_groups, num_seen=1)
    return make_predictor(name, shape, num_groups=num_groups, trace=trace)


def make_policies(trace: Trace, scenario: Scenario, predictor: Predictor | None = None) -> Policies:
    """All of a scenario's policies. `predictor`: a trained one, for the name in the scenario."""
    eviction = make_eviction_for(scenario.eviction, trace)
    if not needs_forecast(scenario):
        return Policies(eviction)
    predictor = predictor or make_predictor_for(scenario.predictor, trace)
    schedule = None
    if scenario.schedule != "none":
        budget = scenario.machine.layer_ms / scenario.machine.record_ms
        schedule = make_schedule(
            scenario.schedule,
            num_layers=trace.num_layers,
            budget=budget,
            looks_at_next=predictor.asks_early,
        )
    return Policies(eviction, schedule, predictor, scenario.extra)
