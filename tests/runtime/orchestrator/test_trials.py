"""From the stepper's clock to the captured step: shares are tried while texts are served, and given up."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hetero_runtime.generation import Request, SamplingParams
from hetero_runtime.graph import capture_step
from hetero_runtime.hf.graph_sequences import GraphSequences
from hetero_runtime.passes import Passes
from hetero_runtime.stats import StatsRecorder
from hetero_runtime.stepping.graph import GraphStepper
from hetero_runtime.turns import Turns
from hetero_scheduler.misses.trials import SETTLE_STEPS
from tests.architectures import build_checkpoint, prompt_ids
from tests.runtime.orchestrator.test_device import load, on_device

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
    while trials.share < 1:
        orchestrator.observe_steps(4, 4 * (1 + trials.share))
    assert said(stepper) == loaded
    computed = orchestrator.device_in_place_stats()
    assert computed.experts > 0

    while not trials.is_lost:
        orchestrator.observe_steps(4, 4 * (1 + trials.share))
    required = orchestrator.device_stats().required
    assert orchestrator.is_outdated
    assert said(stepper) == loaded
    assert not orchestrator.is_outdated
    assert orchestrator.device_in_place_stats() == computed
    assert orchestrator.device_stats().required == required + (NUM_TOKENS - 1) * 2 * parts.store.num_layers
    orchestrator.check()
    orchestrator.close()
    parts.close()
