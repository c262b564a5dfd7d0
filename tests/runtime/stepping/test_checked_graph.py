"""Drafts checked in captured steps, without a GPU: steps run as they are instead of being captured."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hetero_gpu import CacheStats
from hetero_gpu.experts.decode import MOST_TOKENS
from hetero_runtime.config.combinations import MOST_CHECKED
from hetero_runtime.generation import Request, SamplingParams
from hetero_runtime.hf.check_graphs import CheckGraphs
from hetero_runtime.orchestrator import Phase
from hetero_runtime.passes import Passes
from hetero_runtime.speculation import CheckedSequences, Speculation
from hetero_runtime.stats import StatsRecorder
from hetero_runtime.stepping import make_stepper
from hetero_runtime.turns import Turns
from tests.architectures import build_checkpoint, prompt_ids, reference_model
from tests.runtime.hf.plain import greedy_logits, tokens_of
from tests.runtime.speculation.imagined import OneRow, OracleRow
from tests.runtime.stepping.idle import IdleOrchestrator

PROMPT = prompt_ids(9, seed=3)[0]
NUM_TOKENS = 40
MOST = 6


class Experts(IdleOrchestrator):
    """Remembers which rows of each step were tokens."""

    def __init__(self) -> None:
        self.active = torch.ones(MOST, dtype=torch.bool)
        self.steps: list[list[bool]] = []
        self.timed: list[tuple[int, float]] = []

    def observe_steps(self, num_steps: int, seconds: float) -> None:
        """Of so many tokens."""
        self.timed.append((sum(self.active.tolist()), seconds))

    @contextmanager
    def pass_(self, phase: Phase, *, checkpoint: Callable[[], None]) -> Iterator[None]:
        with super().pass_(phase, checkpoint=checkpoint):
            yield
        if phase is Phase.DECODE:
            self.steps.append(self.active.tolist())


class Recorder:
    """Captures nothing; counts what was captured and what is replayed."""

    def __init__(self) -> None:
        self.num_captured, self.num_replayed = 0, 0

    def __call__(self, work: Callable[[], object]) -> Callable[[], object]:
        self.num_captured += 1
        work()

        def replay() -> None:
            self.num_replayed += 1
            work()

        return replay


@pytest.fixture(scope="module", params=["Qwen3Moe", "GptOss", "DeepseekV3"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_checkpoint(request.param, tmp_path_factory.mktemp(request.param))


def serving(model: Any, expected: list[int], *, every: int, rows: int = 2) -> tuple[Any, Experts, Recorder]:
    """A stepper whose drafts come from `expected`, with an error at every so-manieth token."""
    experts, recorder = Experts(), Recorder()
    graphs = CheckGraphs(model, active=experts.active, rows=rows, max_length=96, capture=recorder)
    graphs.capture(prefill=nullcontext, decode=nullcontext)
    cache: Any = SimpleNamespace(stats=CacheStats, stall_s=lambda: 0.0)
    orchestrator: Any = experts
    passes = Passes(torch.device("cpu"), orchestrator, Turns(), StatsRecorder(cache, orchestrator))
    drafter = OneRow(OracleRow(len(PROMPT), expected, every=every))
    stepper = make_stepper(CheckedSequences(graphs), passes, Speculation(drafter, k=MOST - 1))
    return stepper, experts, recorder


def answer(stepper: Any) -> list[int]:
    request = Request(tuple(PROMPT.tolist()), SamplingParams(max_tokens=NUM_TOKENS))
    with stepper.open(request, lambda: None) as tokens:
        said = [tokens.first({})]
        while len(said) < NUM_TOKENS:
            said.append(tokens.next())
    return said


@pytest.mark.parametrize("every", [2, 4, 100])
def test_the_text_is_what_transformers_says(folder: Path, every: int) -> None:
    expected = tokens_of(greedy_logits(reference_model(folder), PROMPT, num_steps=NUM_TOKENS - 1))
    stepper, experts, recorder = serving(reference_model(folder), expected, every=every)
    assert answer(stepper) == expected
    assert answer(stepper) == expected  # the row is used again
    assert recorder.num_captured == 2 * 4  # two rows, steps of 1, 2, 4 and 6 tokens
    assert recorder.num_replayed == len(experts.steps)
    assert len(experts.steps) <= 2 * (NUM_TOKENS // min(every, MOST) + 2)


def test_rows_of_a_step_that_are_no_tokens_are_told_to_the_experts(folder: Path) -> None:
    expected = tokens_of(greedy_logits(reference_model(folder), PROMPT, num_steps=NUM_TOKENS - 1))
    stepper, experts, _ = serving(reference_model(folder), expected, every=100)
    answer(stepper)
    counts = [sum(step) for step in experts.steps]
    assert all(step == sorted(step, reverse=True) for step in experts.steps)
    assert sum(counts) == NUM_TOKENS - 1  # everything was right: each token was read once
    assert max(counts) == MOST


def test_checks_of_the_usual_number_of_tokens_are_timed(folder: Path) -> None:
    expected = tokens_of(greedy_logits(reference_model(folder), PROMPT, num_steps=NUM_TOKENS - 1))
    stepper, experts, _ = serving(reference_model(folder), expected, every=100)
    answer(stepper)
    counts = [sum(step) for step in experts.steps]
    assert counts[:-1] == [MOST] * (len(counts) - 1)
    assert counts[-1] < MOST
    assert [count for count, _ in experts.timed] == counts[:-1]  # the last one does not compare
    assert min(seconds for _, seconds in experts.timed) > 0


def test_what_a_configuration_allows_is_what_kernels_take() -> None:
    assert MOST_CHECKED == MOST_TOKENS
