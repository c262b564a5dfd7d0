"""The simulator finds the hits that the engine counts: same routing, same cache, decision for decision."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hetero_runtime.engine import Engine
from hetero_runtime.orchestrator.eager import EagerOrchestrator
from hetero_scheduler.simulator import Scenario, simulate
from hetero_scheduler.trace import Trace
from tests.architectures import build_checkpoint

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
