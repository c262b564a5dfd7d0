"""The compiled replay of forecasts makes the reference's decisions: every count is the same, stalls too."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hetero_scheduler.predict import Forecast, Predictor, RouterShape
from hetero_scheduler.predict.persistence import Persistence
from hetero_scheduler.predict.refined import Refined
from hetero_scheduler.predict.refinement import Refinement
from hetero_scheduler.simulator import Machine, Scenario, simulate
from hetero_scheduler.simulator.ahead_script import SCHEDULES, can_replay
from hetero_scheduler.simulator.fast_ahead import replay_ahead
from hetero_scheduler.simulator.foreseen import Foreseen
from hetero_scheduler.simulator.policies import make_predictor_for
from hetero_scheduler.trace import Trace
from tests.scheduler.simulator.traces import structured_trace

LAYERS, EXPERTS, TOP_K = 6, 16, 3
FAST = Machine(layer_ms=1.0, record_bytes=700_000, link_gb_s=1.0)
SLOW = Machine(layer_ms=1.0, record_bytes=2_300_000, link_gb_s=1.0, forecast_ms=0.125)


def heard_early(seed: int = 0) -> Trace:
    """A trace whose routers were also asked early, with noise."""
    trace = structured_trace(90, LAYERS, EXPERTS, TOP_K, seed=seed)
    noise = np.random.default_rng(seed).normal(0, 1, trace.logits.shape)
    tokens = np.arange(trace.num_tokens, dtype=np.int32) % 7
    return replace(trace, early=(trace.logits + noise).astype(np.float16), tokens=tokens)


def refined(nearest: str) -> Predictor:
    """Of what was chosen last, made anew as more is known; three steps are looked ahead."""
    rng = np.random.default_rng(1)
    refinement = Refinement(
        scale=np.ones(LAYERS, np.float32),
        embedding=rng.normal(0, 1, (7, 2)).astype(np.float32),
        head=rng.normal(0, 0.3, (LAYERS, EXPERTS, 2)).astype(np.float32),
        bias=np.zeros((LAYERS, EXPERTS), np.float32),
        pool=np.ones((LAYERS, 2), np.float32),
    )
    last = Persistence(RouterShape(LAYERS, EXPERTS, TOP_K), horizon=3)
    if nearest == "step":
        return last
    return Refined(last, refinement, num_layers=LAYERS, nearest="layer" if nearest == "layer" else "token")


def scenario(schedule: str, machine: Machine, residency: float) -> Scenario:
    return Scenario(
        eviction="belady", schedule=schedule, predictor="refined", residency=residency, machine=machine
    )


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("nearest", ["step", "token", "layer"])
@pytest.mark.parametrize(
    "machine",
    [FAST, SLOW, replace(FAST, overtakes=True), replace(SLOW, overtakes=True)],
    ids=["fast", "slow", "fast, overtaken", "slow, overtaken"],
)
def test_every_count_is_the_references(schedule: str, nearest: str, machine: Machine) -> None:
    """Few slots, where prefetches find no room, and many; the reference asks the predictor itself."""
    trace = heard_early()
    foreseen = Foreseen(refined(nearest), trace)
    for residency in (0.06, 0.3, 0.6):
        each = scenario(schedule, machine, residency)
        reference = simulate(trace, each, predictor=refined(nearest)).counts
        assert simulate(trace, each, predictor=foreseen).counts == reference
        assert (reference.prefetches > 0) == (schedule != "none")


def test_forecasts_of_one_step_and_of_nine() -> None:
    """Windows that run out, and documents that end."""
    trace = heard_early(seed=3)
    for name in ("oracle", "oracle_next", "frequency"):
        foreseen = Foreseen(make_predictor_for(name, trace), trace)
        each = scenario("jsd", FAST, 0.3)
        assert simulate(trace, each, predictor=foreseen).counts == (
            simulate(trace, each, predictor=foreseen, is_reference=True).counts
        )
    short = Foreseen(Persistence(RouterShape(LAYERS, EXPERTS, TOP_K), horizon=1), trace)
    each = scenario("jsd", SLOW, 0.3)
    assert simulate(trace, each, predictor=short).counts == (
        simulate(trace, each, predictor=short, is_reference=True).counts
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"eviction": "lru"},
        {"schedule": "edf"},
        {"pool": "per_layer"},
        {"machine": replace(FAST, copies_in_flight=2)},
    ],
    ids=str,
)
def test_what_is_not_compiled_goes_to_the_reference(changes: dict[str, object]) -> None:
    trace = heard_early()
    foreseen = Foreseen(refined("layer"), trace)
    each = replace(scenario("jsd", FAST, 0.3), **changes)  # type: ignore[arg-type]
    assert not can_replay(each)
    assert simulate(trace, each, predictor=foreseen).counts.prefetches > 0
    with pytest.raises(AssertionError, match="the compiled replay does not know"):
        replay_ahead(trace, foreseen, each, num_slots=28, first_counted=0)


class _HalfSilent(Persistence):
    """Speaks of the first half alone."""

    def forecast(self) -> Forecast | None:
        return super().forecast() if self._layer < LAYERS // 2 else None


def test_a_predictor_that_leaves_layers_out_is_refused() -> None:
    silent = _HalfSilent(RouterShape(LAYERS, EXPERTS, TOP_K))
    with pytest.raises(ValueError, match=r"forecasts layers \[0, 1, 2\] of 6"):
        Foreseen(silent, heard_early())
