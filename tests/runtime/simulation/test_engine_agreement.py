"""The simulator finds the hits that the engine counts: same routing, same cache, decision for decision."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from hetero_gpu import CacheStats
from hetero_runtime.config.tree import Horizon
from hetero_runtime.engine import Engine
from hetero_runtime.foresight import Foresight
from hetero_runtime.foresight.rows import Row
from hetero_runtime.orchestrator.eager import EagerOrchestrator
from hetero_runtime.prediction import read_predictor
from hetero_runtime.prediction.horizons import predictors_of
from hetero_scheduler.predict import Forecast
from hetero_scheduler.simulator import Machine, Scenario, SimulationResult, simulate
from hetero_scheduler.trace import Trace
from tests.architectures import build_checkpoint
from tests.runtime.foresight.imagined import imagine_link
from tests.runtime.foresight.predictors import write_random_predictor

NUM_LAYERS, NUM_EXPERTS = 3, 16


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_checkpoint("Qwen3Moe", tmp_path_factory.mktemp("model"))


@pytest.fixture
def routed(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Grows by the experts of every layer that any engine runs for one token."""
    seen: list[list[int]] = []
    run_layer = EagerOrchestrator.run_layer

    def listening(self: EagerOrchestrator, layer: int, hidden: torch.Tensor, *routing: Any) -> torch.Tensor:
        seen.extend(routing[0].tolist())
        return run_layer(self, layer, hidden, *routing)

    monkeypatch.setattr(EagerOrchestrator, "run_layer", listening)
    return seen


def recorded(routed: list[list[int]]) -> Trace:
    topk = np.array(routed).reshape(-1, NUM_LAYERS, len(routed[0]))
    logits = np.zeros((len(topk), NUM_LAYERS, NUM_EXPERTS), dtype=np.float16)
    return Trace(logits, topk, np.zeros(len(topk), dtype=np.int32), np.array([0, len(topk)]))


@pytest.mark.parametrize("residency", [0.25, 0.5, 0.8])
@pytest.mark.parametrize("pool", ["global", "per_layer"])
@pytest.mark.parametrize("policy", ["lru", "lfu", "lfru"])
def test_engine_and_simulator_count_the_same(
    checkpoint: Path, routed: list[list[int]], policy: str, pool: Any, residency: float
) -> None:
    with Engine.load(
        checkpoint,
        device="cpu",
        memory={"residency": residency, "pool": pool},
        eviction={"policy": policy},
        prefetch={"schedule": "none"},
    ) as engine:
        # a prompt of one token, so that its prefill is a step like any other
        engine.generate([7], max_tokens=80, ignore_eos=True, temperature=1.0, seed=1)
        decode = engine.stats().decode
    trace = recorded(routed)
    assert decode.passes == trace.num_tokens - 1 == 79
    result = simulate(
        trace,
        Scenario(eviction=policy, pool=pool, residency=residency, uncounted=1 / trace.num_tokens),
    )
    assert result.tokens == decode.passes
    assert result.counts.required == decode.cache.required
    assert result.counts.hits == decode.cache.hits
    assert result.counts.misses == decode.cache.misses == decode.cache.loads
    assert 0.2 < result.hit_rate < 1


# ---- with forecasts

NUM_STEPS = 60
HORIZONS: dict[str, Horizon] = {"mamba2": "step", "mamba2_token": "token", "mamba2_layer": "layer"}


class Heard(NamedTuple):
    """What any engine hears: router logits of every layer, asked in time and early, and tokens."""

    logits: list[np.ndarray]
    early: list[np.ndarray]
    tokens: list[int]


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> Heard:
    seen = Heard([], [], [])
    hear, begin_step = Foresight.hear, Row.begin_step

    def listening(self: Foresight, layer: int, logits: torch.Tensor, hidden: torch.Tensor) -> None:
        hear(self, layer, logits, hidden)
        seen.logits.append(logits.to(torch.float16).numpy())
        assert isinstance(self._row, Row)
        early = self._row._heard_early if layer + 1 < NUM_LAYERS else None
        seen.early.append(np.zeros((1, NUM_EXPERTS), np.float16) if early is None else early)

    def beginning(self: Row, token: int) -> list[Forecast]:
        seen.tokens.append(token)
        return begin_step(self, token)

    monkeypatch.setattr(Foresight, "hear", listening)
    monkeypatch.setattr(Row, "begin_step", beginning)
    return seen


@pytest.fixture(scope="module")
def predictor(checkpoint: Path) -> Path:
    return write_random_predictor(checkpoint, is_refined=True)


def engine_counts(folder: Path, scenario: Scenario) -> CacheStats:
    """Two texts, one after the other, each from a prompt of one token, so that all steps are alike."""
    with Engine.load(
        folder,
        device="cpu",
        memory={"residency": scenario.residency, "pool": scenario.pool},
        prediction=prediction_of(scenario.predictor),
        prefetch={"schedule": scenario.schedule, "extra": scenario.extra * (scenario.schedule != "none")},
        eviction={"policy": scenario.eviction},
    ) as engine:
        orchestrator = engine._parts.orchestrator
        assert isinstance(orchestrator, EagerOrchestrator)
        orchestrator.prompts = None  # a trace knows no prefill
        for seed in (1, 2):
            engine.generate([7], max_tokens=NUM_STEPS, ignore_eos=True, temperature=1.0, seed=seed)
        stats = engine.stats()
    return stats.prefill.cache + stats.decode.cache


def prediction_of(name: str) -> dict[str, str]:
    """The engine's section for a predictor of the scenarios."""
    horizon = HORIZONS.get(name)
    return {"predictor": name} if horizon is None else {"predictor": "mamba2", "horizon": horizon}


def simulated(routed: list[list[int]], heard: Heard, scenario: Scenario, path: Path) -> Any:
    early = np.concatenate(heard.early).reshape(-1, NUM_LAYERS, NUM_EXPERTS)
    trace = Trace(
        np.concatenate(heard.logits).reshape(-1, NUM_LAYERS, NUM_EXPERTS),
        recorded(routed).topk,
        np.array(heard.tokens, dtype=np.int32),
        np.array([0, NUM_STEPS, 2 * NUM_STEPS]),
        early=np.roll(early, 1, axis=1),  # heard at a layer, said by the next
    )
    horizon = HORIZONS.get(scenario.predictor)
    if horizon is None:
        return simulate(trace, scenario)
    (trained,) = predictors_of(read_predictor(path), 1, nearest=horizon)
    return simulate(trace, scenario, predictor=trained)


def assert_alike(found: CacheStats, result: SimulationResult) -> None:
    counts = result.counts
    assert found.required == counts.required
    assert (found.hits, found.late, found.misses) == (counts.hits, counts.late, counts.misses)
    assert found.prefetches == counts.prefetches
    assert found.prefetches_wasted == counts.prefetches_wasted
    assert found.hits_prefetched + found.late == counts.prefetches_used


@pytest.mark.parametrize(("pool", "residency"), [("global", 0.25), ("per_layer", 0.5)])
@pytest.mark.parametrize(
    ("predictor_name", "schedule", "eviction", "layers_a_copy"),
    [
        ("mamba2", "jsd", "belady", 1),
        ("mamba2_token", "edf", "belady", 1),
        ("mamba2_layer", "none", "belady", 1),
        ("mamba2_layer", "edf", "lru", 2),
        ("mamba2", "none", "belady", 1),
        ("mamba2", "jsd", "lru", 1),
        ("mamba2", "moe_infinity", "belady", 2),
        ("frequency", "promoe", "belady", 3),
        ("frequency", "edf", "lfru", 1),
        ("frequency", "top_b", "belady", 2),
    ],
)
def test_engine_and_simulator_foresee_the_same(
    predictor_name: str,
    schedule: str,
    eviction: str,
    layers_a_copy: int,
    pool: Any,
    residency: float,
    *,
    checkpoint: Path,
    predictor: Path,
    routed: list[list[int]],
    heard: Heard,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scenario = Scenario(
        eviction=eviction,
        schedule=schedule,
        predictor=predictor_name,
        residency=residency,
        pool=pool,
        uncounted=0.0,
        machine=Machine(layer_ms=1.0, record_bytes=layers_a_copy * 1_000_000, link_gb_s=1.0),
    )
    imagine_link(monkeypatch, layers_a_copy)
    found = engine_counts(checkpoint, scenario)
    result = simulated(routed, heard, scenario, predictor)
    assert_alike(found, result)
    assert schedule == "none" or found.prefetches > 20


@pytest.mark.parametrize(
    ("predictor_name", "layers_a_copy"),
    [("mamba2", 2), ("mamba2", 3), ("mamba2_token", 1), ("mamba2_layer", 1)],
)
def test_a_budget_makes_no_more_than_a_point(
    predictor_name: str,
    layers_a_copy: int,
    *,
    checkpoint: Path,
    predictor: Path,
    routed: list[list[int]],
    heard: Heard,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The simulator counts in positions, which stand still in a stall; the engine in time, which does not.
    It matters where copies take longer than a layer, or begin between steps and last into a stall."""
    scenario = Scenario(
        eviction="belady",
        schedule="jsd",
        predictor=predictor_name,
        residency=0.4,
        uncounted=0.0,
        machine=Machine(layer_ms=1.0, record_bytes=layers_a_copy * 1_000_000, link_gb_s=1.0),
    )
    imagine_link(monkeypatch, layers_a_copy)
    found = engine_counts(checkpoint, scenario)
    assert abs(found.hit_rate - simulated(routed, heard, scenario, predictor).hit_rate) <= 0.01
