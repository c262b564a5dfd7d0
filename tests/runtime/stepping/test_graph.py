"""The graph stepper without a GPU: its steps run as they are instead of being captured."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hetero_gpu import CacheStats
from hetero_runtime.errors import RequestError
from hetero_runtime.generation import Request, SamplingParams
from hetero_runtime.hf.graph_sequences import GraphSequences, StepPlan
from hetero_runtime.orchestrator import Phase
from hetero_runtime.passes import Passes
from hetero_runtime.stats import StatsRecorder
from hetero_runtime.stepping import Tokens, graph, make_stepper
from hetero_runtime.turns import Turns
from tests.architectures import build_checkpoint, prompt_ids, reference_model
from tests.runtime.hf.plain import greedy_logits, tokens_of
from tests.runtime.stepping.idle import IdleOrchestrator

PROMPTS = [prompt_ids(5 + 3 * seed, seed=seed)[0].tolist() for seed in range(4)]
NUM_TOKENS = 20


class Experts(IdleOrchestrator):
    """`failure` is raised at the end of the next decode pass."""

    def __init__(self) -> None:
        self.failure: Exception | None = None

    @contextmanager
    def pass_(self, phase: Phase, *, checkpoint: Callable[[], None]) -> Iterator[None]:
        with super().pass_(phase, checkpoint=checkpoint):
            yield
        failure, self.failure = self.failure, None
        if phase is Phase.DECODE and failure is not None:
            raise failure


class Diary:
    """Writes down what it is told of texts."""

    def __init__(self) -> None:
        self.entries: list[str] = []

    @contextmanager
    def read(self, row: int, ids: torch.Tensor, *, is_first: bool, images: Any = None) -> Iterator[None]:
        assert is_first
        yield
        self.entries.append(f"read {len(ids)} in {row}")

    def end(self, row: int) -> None:
        self.entries.append(f"end {row}")


class Served:
    """A model behind a graph stepper of `rows` rows, and what was submitted to it."""

    def __init__(self, model: Any, rows: int) -> None:
        self.diary = Diary()
        self.sequences = GraphSequences(
            model,
            active=torch.ones(rows, dtype=torch.bool),
            max_length=96,
            capture=lambda work: work,
            texts=self.diary,
        )
        self.sequences.capture(prefill=nullcontext, decode=nullcontext)
        self.plans: list[StepPlan] = []
        submit = self.sequences.submit

        def recording(plan: StepPlan) -> Any:
            self.plans.append(plan)
            return submit(plan)

        self.sequences.submit = recording  # type: ignore[method-assign]
        self.experts = Experts()
        cache: Any = SimpleNamespace(stats=CacheStats, stall_s=lambda: 0.0)
        experts: Any = self.experts
        self.stats = StatsRecorder(cache, experts)
        self.stepper = make_stepper(self.sequences, Passes(torch.device("cpu"), experts, Turns(), self.stats))

    def open(self, prompt: list[int], checkpoint: Callable[[], None] = lambda: None, **params: Any) -> Any:
        request = Request(tuple(prompt), SamplingParams(**{"max_tokens": NUM_TOKENS, **params}))
        return self.stepper.open(request, checkpoint)

    def answer(self, prompt: list[int], **params: Any) -> list[int]:
        with self.open(prompt, **params) as tokens:
            return read(tokens, params.get("max_tokens", NUM_TOKENS))


def read(tokens: Tokens, count: int) -> list[int]:
    said = [tokens.first({})]
    while len(said) < count:
        said.append(tokens.next())
    return said


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: build_checkpoint(name, tmp_path_factory.mktemp(name)) for name in ("Qwen3Moe", "Qwen3Next")}


@pytest.fixture
def served(folders: dict[str, Path]) -> Served:
    return Served(reference_model(folders["Qwen3Moe"]), rows=3)


@pytest.fixture(scope="module")
def expected(folders: dict[str, Path]) -> list[list[int]]:
    """What transformers says to each of PROMPTS."""
    model = reference_model(folders["Qwen3Moe"])
    return [
        tokens_of(greedy_logits(model, torch.tensor(prompt), num_steps=NUM_TOKENS - 1)) for prompt in PROMPTS
    ]


def test_one_request_gives_transformers_tokens_and_no_step_too_many(
    served: Served, expected: list[list[int]]
) -> None:
    assert served.answer(PROMPTS[0]) == expected[0]
    assert served.answer(PROMPTS[1]) == expected[1]
    assert sum(len(plan.active) for plan in served.plans) == 2 * (NUM_TOKENS - 1)
    assert all(plan.active == [[True]] * len(plan.active) for plan in served.plans)
    decode = served.stats._phases[Phase.DECODE]
    assert decode.tokens == decode.passes == 2 * (NUM_TOKENS - 1)


def test_requests_of_several_threads_share_steps(served: Served, expected: list[list[int]]) -> None:
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(served.answer, PROMPTS[:3])) == expected[:3]
    steps = [step for plan in served.plans for step in plan.active]
    assert sum(map(sum, steps)) == 3 * (NUM_TOKENS - 1)
    assert any(sum(step) > 1 for step in steps), "they never met"


def test_a_request_joins_and_leaves_while_others_go_on(served: Served, expected: list[list[int]]) -> None:
    with served.open(PROMPTS[0]) as first:
        said = [first.first({})]
        said += [first.next() for _ in range(5)]
        with served.open(PROMPTS[1]) as second:
            assert read(second, 4) == expected[1][:4]
        said += [first.next() for _ in range(5)]
        assert served.answer(PROMPTS[2]) == expected[2]
        said += [first.next() for _ in range(NUM_TOKENS - len(said))]
    assert said == expected[0]


def test_who_listens_is_told_of_each_text_and_its_end(served: Served) -> None:
    """The text of the capture, of which nothing was read, ends too."""
    with served.open(PROMPTS[0]) as first:
        first.first({})
        with served.open(PROMPTS[1]) as second:
            second.first({})
            second.next()
        with served.sequences.open() as sequence:
            sequence.extend(torch.tensor(PROMPTS[2]))
    told = ["read 1 in 0", "end 0", "read 5 in 0", "read 8 in 1", "read 11 in 2", "end 2"]
    assert served.diary.entries == told
    served.answer(PROMPTS[3], max_tokens=2)
    assert served.diary.entries == [*told, "end 1", "end 0", "read 14 in 0"]


def test_a_row_that_nobody_samples_reads_one_token_by_the_step(
    served: Served, expected: list[list[int]]
) -> None:
    """Beside a request, whose next step goes on as if there had been none."""
    with served.open(PROMPTS[0]) as request:
        said = [request.first({}), request.next()]
        with served.sequences.open() as sequence:
            tokens = [int(sequence.extend(torch.tensor(PROMPTS[1])).argmax())]
            num_reads = len(served.diary.entries)
            while len(tokens) < NUM_TOKENS:
                logits = sequence.extend(torch.tensor(tokens[-1:]))
                tokens.append(int(logits.argmax()))
            assert len(served.diary.entries) == num_reads, "a step is no prompt"
        while len(said) < NUM_TOKENS:
            said.append(request.next())
    assert (said, tokens) == (expected[0], expected[1])


def test_recurrent_rows_step_apart(folders: dict[str, Path]) -> None:
    model = reference_model(folders["Qwen3Next"])
    truth = [tokens_of(greedy_logits(model, torch.tensor(prompt), num_steps=9)) for prompt in PROMPTS[:2]]
    served = Served(model, rows=2)
    with served.open(PROMPTS[0]) as first, served.open(PROMPTS[1]) as second:
        said = [[first.first({})], [second.first({})]]
        for row in itertools.islice(itertools.cycle([0, 0, 1]), 18):
            if len(said[row]) < 10:
                said[row].append((first, second)[row].next())
    assert said[0] == truth[0]
    assert said[1] == truth[1][: len(said[1])]


def test_a_seed_gives_the_same_tokens_alone_and_among_others(served: Served) -> None:
    params = {"temperature": 0.9, "top_p": 0.95, "repetition_penalty": 1.1, "seed": 5}
    alone = served.answer(PROMPTS[0], **params)
    assert served.answer(PROMPTS[0], **params) == alone
    assert served.answer(PROMPTS[0], **{**params, "seed": 6}) != alone
    with ThreadPoolExecutor(2) as pool:
        other = pool.submit(served.answer, PROMPTS[1])
        assert served.answer(PROMPTS[0], **params) == alone
        other.result()


def test_nobody_is_advanced_far_beyond_what_is_read(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph, "VISIT_S", 0.0)  # rounds of one step
    with served.open(PROMPTS[0]) as idle, served.open(PROMPTS[1]) as busy:
        idle.first({})
        busy.first({})
        for _ in range(NUM_TOKENS - 1):
            busy.next()
        assert sum(step[0] for plan in served.plans for step in plan.active) <= 2


def test_short_steps_share_a_visit(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph, "VISIT_S", 1e3)
    served.answer(PROMPTS[0], max_tokens=18)
    assert [len(plan.active) for plan in served.plans] == [8, 8, 1]


def test_an_unwanted_request_ends_and_gives_its_row_back(served: Served, expected: list[list[int]]) -> None:
    class UnwantedError(Exception):
        pass

    def unwanted() -> None:
        raise UnwantedError

    for _ in range(4):  # more than there are rows
        with pytest.raises(UnwantedError), served.open(PROMPTS[0], unwanted) as tokens:
            tokens.first({})
    assert served.answer(PROMPTS[1]) == expected[1]


def test_unsound_logits_end_their_request_alone(served: Served, expected: list[list[int]]) -> None:
    with served.open(PROMPTS[0]) as broken, served.open(PROMPTS[1]) as sound:
        said = [sound.first({})]
        broken.first({})
        step = served.sequences._sequences.step

        def step_with_nan(tokens: torch.Tensor) -> torch.Tensor:
            logits = step(tokens)
            logits[0] = torch.nan
            return logits

        served.sequences._sequences.step = step_with_nan  # type: ignore[method-assign]
        with pytest.raises(RequestError, match=r"step 1 .*NaN"):
            broken.next()
        said += [sound.next() for _ in range(NUM_TOKENS - 1)]
    assert said == expected[1]


def test_a_failing_pass_ends_all_rows_and_the_engine_still_serves(
    served: Served, expected: list[list[int]]
) -> None:
    with served.open(PROMPTS[0]) as first, served.open(PROMPTS[1]) as second:
        first.first({})
        second.first({})
        served.experts.failure = RuntimeError("no slot")
        for tokens in (first, second, first):
            with pytest.raises(RuntimeError, match="no slot"):
                tokens.next()
    assert served.answer(PROMPTS[2]) == expected[2]


def test_row_counts_are_powers_of_two_and_all(folders: dict[str, Path]) -> None:
    model = reference_model(folders["Qwen3Moe"])
    for rows, counts in ((1, [1]), (2, [1, 2]), (3, [1, 2, 3]), (4, [1, 2, 4]), (8, [1, 2, 4, 8])):
        sequences = GraphSequences(model, active=torch.ones(rows, dtype=torch.bool), max_length=8)
        assert sequences.row_counts == counts


def test_the_orchestrator_hears_what_steps_took(served: Served) -> None:
    laps: list[tuple[int, float]] = []
    served.experts.observe_steps = lambda steps, seconds: laps.append((steps, seconds))  # type: ignore[method-assign]
    served.answer(PROMPTS[0])
    assert sum(steps for steps, _ in laps) == sum(len(plan.active) for plan in served.plans)
    assert all(seconds > 0 for _, seconds in laps)


@pytest.fixture
def captured(served: Served, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Grows by a word when steps are captured anew, after which they are not outdated."""
    said: list[str] = []
    capture = served.sequences.capture_again

    def capture_again() -> None:
        capture()
        said.append("captured")
        monkeypatch.setattr(Experts, "is_outdated", False)

    monkeypatch.setattr(served.sequences, "capture_again", capture_again)
    return said


def test_an_outdated_step_is_captured_anew_when_the_last_text_ends(
    served: Served, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch, captured: list[str]
) -> None:
    with served.open(PROMPTS[1]) as beside:
        beside.first({})
        monkeypatch.setattr(Experts, "is_outdated", True)
        assert served.answer(PROMPTS[0]) == expected[0]
        assert not captured  # somebody's text is in a row
    assert captured == ["captured"]  # and the next first token does not wait for that
    assert served.answer(PROMPTS[0]) == expected[0]
    assert captured == ["captured"]


def test_a_text_after_an_abandoned_one_captures_the_outdated_step(
    served: Served, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch, captured: list[str]
) -> None:
    def stream() -> Iterator[int]:
        with served.open(PROMPTS[1]) as tokens:
            yield tokens.first({})

    abandoned = stream()
    next(abandoned)
    monkeypatch.setattr(Experts, "is_outdated", True)
    abandoned.close()
    assert not captured  # this may have been inside another's turn
    assert served.answer(PROMPTS[0]) == expected[0]
    assert captured == ["captured"]
