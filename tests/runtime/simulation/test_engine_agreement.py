"""The simulator finds the hits that the engine counts: same routing, same cache, decision for decision."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hetero_gpu import CacheStats
from hetero_runtime.engine import Engine
from hetero_runtime.foresight import Foresight
from hetero_runtime.orchestrator.eager import EagerOrchestrator
from hetero_runtime.prediction import read_predictor
from hetero_scheduler.predict.mamba2 import Mamba2Predictor
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


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> list[np.ndarray]:
    """Grows by the router logits of every layer that any engine hears."""
    seen: list[np.ndarray] = []
    hear = Foresight.hear

    def listening(self: Foresight, layer: int, logits: torch.Tensor) -> None:
        hear(self, layer, logits)
        seen.append(logits.to(torch.float16).numpy())

    monkeypatch.setattr(Foresight, "hear", listening)
    return seen


@pytest.fixture(scope="module")
def predictor(checkpoint: Path) -> Path:
    return write_random_predictor(checkpoint)


def engine_counts(folder: Path, scenario: Scenario) -> CacheStats:
    """Two texts, one after the other, each from a prompt of one token, so that all steps are alike."""
    with Engine.load(
        folder,
        device="cpu",
        memory={"residency": scenario.residency, "pool": scenario.pool},
        prediction={"predictor": scenario.predictor},
        prefetch={"schedule": scenario.schedule, "extra": scenario.extra * (scenario.schedule != "none")},
        eviction={"policy": scenario.eviction},
    ) as engine:
        orchestrator = engine._parts.orchestrator
        assert isinstance(orchestrator, EagerOrchestrator)
        orchestrator.is_fetching_ahead = False  # a trace knows no prefill
        for seed in (1, 2):
            engine.generate([7], max_tokens=NUM_STEPS, ignore_eos=True, temperature=1.0, seed=seed)
        stats = engine.stats()
    return stats.prefill.cache + stats.decode.cache


def simulated(routed: list[list[int]], heard: list[np.ndarray], scenario: Scenario, path: Path) -> Any:
    without_logits = recorded(routed)
    trace = Trace(
        np.concatenate(heard).reshape(-1, NUM_LAYERS, NUM_EXPERTS),
        without_logits.topk,
        without_logits.tokens,
        np.array([0, NUM_STEPS, 2 * NUM_STEPS]),
    )
    trained = Mamba2Predictor(read_predictor(path).models) if scenario.predictor == "mamba2" else None
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
    heard: list[np.ndarray],
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


@pytest.mark.parametrize("layers_a_copy", [2, 3])
def test_a_slow_links_budget_makes_no_more_than_a_point(
    layers_a_copy: int,
    *,
    checkpoint: Path,
    predictor: Path,
    routed: list[list[int]],
    heard: list[np.ndarray],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The simulator counts in positions, which stand still in a stall; the engine in time, which does not."""
    scenario = Scenario(
        eviction="belady",
        schedule="jsd",
        predictor="mamba2",
        residency=0.4,
        uncounted=0.0,
        machine=Machine(layer_ms=1.0, record_bytes=layers_a_copy * 1_000_000, link_gb_s=1.0),
    )
    imagine_link(monkeypatch, layers_a_copy)
    found = engine_counts(checkpoint, scenario)
    assert abs(found.hit_rate - simulated(routed, heard, scenario, predictor).hit_rate) <= 0.01
