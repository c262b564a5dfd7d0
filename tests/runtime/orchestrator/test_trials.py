"""From the stepper's clock to the captured step: shares are tried while texts are served, and given up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hetero_runtime.engine import Engine
from hetero_runtime.generation import Request, SamplingParams
from hetero_runtime.graph import capture_step
from hetero_runtime.hf.graph_sequences import GraphSequences
from hetero_runtime.orchestrator.device import DeviceOrchestrator
from hetero_runtime.passes import Passes
from hetero_runtime.stats import StatsRecorder
from hetero_runtime.stepping.graph import GraphStepper
from hetero_runtime.turns import Turns
from hetero_scheduler.trials import SETTLE_STEPS
from tests.architectures import build_checkpoint, prompt_ids
from tests.runtime.orchestrator.test_device import load, on_device
from tests.runtime.steps_on_cpu import steps_on_cpu

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the interpreter stands in where there is no GPU"
)

NUM_TOKENS = 2


def said(stepper: GraphStepper) -> list[int]:
    request = Request(tuple(prompt_ids(9)[0].tolist()), SamplingParams(max_tokens=NUM_TOKENS))
    with stepper.open(request, lambda: None) as tokens:
        return [tokens.first({}), *(tokens.next() for _ in range(NUM_TOKENS - 1))]


def test_steps_are_timed_shares_applied_and_a_lost_cpu_left_out_of_the_next_step(tmp_path: Path) -> None:
    parts = load(build_checkpoint("Mixtral", tmp_path), "lru", residency=0.35, handler="hybrid")
    orchestrator = on_device(parts, top_k=2)
    active, trials = orchestrator._active, orchestrator.trials
    assert trials is not None
    sequences = GraphSequences(parts.model, active=active, max_length=64, capture=lambda work: work)
    capture_step(sequences, orchestrator)
    assert orchestrator.device_stats().required == 0
    passes = Passes(torch.device("cpu"), orchestrator, Turns(), StatsRecorder(parts.cache, orchestrator))
    stepper = GraphStepper(sequences, passes)

    loaded = said(stepper)
    assert trials._settling == SETTLE_STEPS - (NUM_TOKENS - 1)
    assert orchestrator.device_in_place_stats().experts == 0
    while trials.choice < 1:
        orchestrator.observe_steps(4, 4 * (1 + trials.choice))
    assert said(stepper) == loaded
    computed = orchestrator.device_in_place_stats()
    assert computed.experts > 0

    while not trials.is_lost:
        orchestrator.observe_steps(4, 4 * (1 + trials.choice))
    required = orchestrator.device_stats().required
    assert orchestrator.is_outdated
    assert said(stepper) == loaded
    assert not orchestrator.is_outdated
    assert orchestrator.device_in_place_stats() == computed
    assert orchestrator.device_stats().required == required + (NUM_TOKENS - 1) * 2 * parts.store.num_layers
    orchestrator.check()
    orchestrator.close()
    parts.close()


def test_checks_of_drafts_are_timed_and_their_misses_shared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, prompt = build_checkpoint("Mixtral", tmp_path), prompt_ids(6)[0].tolist() * 2
    steps_on_cpu(monkeypatch)

    def engine_with(handler: str) -> Engine:
        words: dict[str, Any] = {
            "memory": {"residency": 0.5},
            "execution": {"mode": "graph", "max_rows": 1, "max_length": 64},
            "speculation": {"drafter": "prompt_lookup", "k": 2},
            "misses": {"handler": handler},
        }
        return Engine.load(folder, device="cpu", **words)

    with engine_with("load") as engine:
        expected = engine.generate(prompt, max_tokens=12, ignore_eos=True).token_ids
    with engine_with("hybrid") as engine:
        orchestrator = engine._parts.orchestrator
        assert isinstance(orchestrator, DeviceOrchestrator)
        trials = orchestrator.trials
        assert trials is not None
        while trials.choice < 0.5:
            trials.observe(4, 4 * (1 - trials.choice / 2))
        assert engine.generate(prompt, max_tokens=12, ignore_eos=True).token_ids == expected
        decode, drafts = engine.stats().decode, engine.stats().drafts
        assert drafts.accepted > 0
        assert decode.in_place.experts > 0
        assert SETTLE_STEPS - drafts.passes <= trials._settling < SETTLE_STEPS
        engine.check()
