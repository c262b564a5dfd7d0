"""One engine and many callers: each gets what it would get alone, and whatever ends early leaves nothing."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from hetero_runtime.errors import DeviceError
from hetero_runtime.experts.compute import ExpertMlp
from hetero_runtime.generation import CancelToken
from tests.architectures import prompt_ids
from tests.runtime.engine.conftest import MakeCheckpoint
from tests.runtime.engine.rest import assert_at_rest
from tests.runtime.engine.serving import LONG, OPTIONS, PROMPTS, Alone, Serve, load

NUM_MOE_LAYERS = 3


class CancelAtLook(CancelToken):
    """Cancelled from the n-th time on that the engine looks: before each pass, and before each layer."""

    def __init__(self, look: int) -> None:
        super().__init__()
        self._looks_left = look

    @property
    def is_cancelled(self) -> bool:
        self._looks_left -= 1
        return self._looks_left < 0


# ---- many callers


def test_four_threads_each_get_their_own_answer(serve: Serve, alone: Alone) -> None:
    engine = serve(max_rows=4)
    with ThreadPoolExecutor(4) as pool:
        completions = list(pool.map(lambda prompt: engine.generate(prompt, **OPTIONS), PROMPTS[:4] * 2))
    assert [c.token_ids for c in completions] == [alone(prompt).token_ids for prompt in PROMPTS[:4] * 2]
    assert [c.text for c in completions] == [alone(prompt).text for prompt in PROMPTS[:4] * 2]
    assert engine.stats().requests == 8


@pytest.mark.parametrize("max_rows", [1, 2])
def test_more_requests_than_rows_wait_for_a_place(serve: Serve, alone: Alone, max_rows: int) -> None:
    engine = serve(max_rows=max_rows)
    most_active = 0

    def ask(prompt: list[int]) -> tuple[int | None, ...]:
        nonlocal most_active
        tokens = []
        for delta in engine.stream(prompt, **OPTIONS):
            tokens.append(delta.token_id)
            most_active = max(most_active, engine.stats().active_rows)
        return tuple(tokens)

    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        answers = list(pool.map(ask, PROMPTS))
    assert answers == [alone(prompt).token_ids for prompt in PROMPTS]
    assert most_active == max_rows


def test_two_engines_in_one_process(serve: Serve, checkpoint: MakeCheckpoint, device: str) -> None:
    ours = serve()
    with load(checkpoint("GptOss"), device) as other:
        expected = [engine.generate(PROMPTS[1], **OPTIONS).token_ids for engine in (ours, other)]
        assert expected[0] != expected[1]
        streams = [engine.stream(PROMPTS[1], **OPTIONS) for engine in (ours, other)]
        steps = [[delta.token_id for delta in step] for step in zip(*streams, strict=True)]
        assert list(zip(*steps, strict=True)) == expected
        assert_at_rest(other)
    assert ours.generate(PROMPTS[1], **OPTIONS).token_ids == expected[0]


def test_seeded_sampling_does_not_depend_on_company(serve: Serve, alone: Alone) -> None:
    engine = serve(max_rows=4)
    options: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95, **OPTIONS}
    with ThreadPoolExecutor(4) as pool:
        completions = list(
            pool.map(lambda seed: engine.generate(PROMPTS[0], seed=seed, **options), [1, 2, 3, 1])
        )
    tokens = [completion.token_ids for completion in completions]
    assert tokens == [alone(PROMPTS[0], **options, seed=seed).token_ids for seed in (1, 2, 3, 1)]
    assert len(set(tokens)) == 3


@pytest.mark.parametrize("slabs", [4, 12])
def test_a_prompt_that_touches_more_experts_than_there_are_slabs(
    serve: Serve, alone: Alone, slabs: int
) -> None:
    engine = serve(slabs=slabs)
    prompt = prompt_ids(150, seed=9)[0].tolist()
    assert engine.generate(prompt, **OPTIONS).token_ids == alone(prompt).token_ids
    assert engine.stats().prefill.cache.required > NUM_MOE_LAYERS * slabs


def test_a_stop_string_ends_the_text_before_itself(serve: Serve, alone: Alone) -> None:
    whole = alone(PROMPTS[1])
    stop = whole.text[5:8]
    completion = serve().generate(PROMPTS[1], stop=(stop,), **OPTIONS)
    assert completion.finish_reason == "stop"
    assert completion.text == whole.text[: whole.text.index(stop)]
    assert completion.token_ids == whole.token_ids[: len(completion.token_ids)]


# ---- ending early


@pytest.mark.parametrize("look", range(2 * (NUM_MOE_LAYERS + 1) + 2))
def test_cancellation_between_any_two_layers(serve: Serve, alone: Alone, look: int) -> None:
    """A pass looks once at its start and once before each layer: the first four looks are prefill's."""
    engine = serve()
    completion = engine.generate(PROMPTS[3], cancel=CancelAtLook(look), **OPTIONS)
    num_tokens = look // (NUM_MOE_LAYERS + 1)
    assert completion.finish_reason == "cancelled"
    assert completion.token_ids == alone(PROMPTS[3]).token_ids[:num_tokens]
    stats = engine.stats()
    assert (stats.prefill.passes, stats.decode.passes) == (min(num_tokens, 1), max(num_tokens - 1, 0))


def test_cancellation_from_another_thread(serve: Serve) -> None:
    engine, cancel = serve(), CancelToken()
    threading.Timer(0.05, cancel.cancel).start()
    completion = engine.generate(PROMPTS[0], cancel=cancel, **LONG)
    assert completion.finish_reason == "cancelled"
    assert len(completion.token_ids) < LONG["max_tokens"]


def test_a_deadline_in_the_past_gives_no_token(serve: Serve) -> None:
    completion = serve().generate(PROMPTS[0], timeout_s=0, **OPTIONS)
    assert (completion.finish_reason, completion.token_ids, completion.text) == ("deadline", (), "")


def test_a_deadline_between_tokens_gives_what_there_is(serve: Serve, alone: Alone) -> None:
    stream = serve().stream(PROMPTS[0], timeout_s=1.0, **OPTIONS)
    first = next(stream)
    time.sleep(1.1)
    (last,) = list(stream)
    assert (first.token_id, last.token_id) == (alone(PROMPTS[0]).token_ids[0], None)
    assert last.finish_reason == "deadline"


def test_a_request_that_waits_for_a_place_keeps_its_deadline(serve: Serve) -> None:
    engine = serve(max_rows=1)
    holder = engine.stream(PROMPTS[0], **LONG)
    next(holder)
    completion = engine.generate(PROMPTS[1], timeout_s=0.05, **OPTIONS)
    assert (completion.finish_reason, completion.token_ids) == ("deadline", ())
    holder.close()


@pytest.mark.parametrize("how", ["close", "drop"])
def test_a_stream_left_early_gives_its_place_back(serve: Serve, how: str) -> None:
    engine = serve(max_rows=1)
    stream = engine.stream(PROMPTS[0], **LONG)
    next(stream)
    assert engine.stats().active_rows == 1
    if how == "close":
        stream.close()
    del stream
    assert engine.stats().active_rows == 0


@pytest.mark.parametrize(
    ("error", "expected", "message"),
    [
        (OSError("the link is down"), OSError, "the link is down"),
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 7 bytes"),
            DeviceError,
            r"the host has no room for a pass over 5 tokens \(DefaultCPUAllocator: .* 7 bytes\); lower",
        ),
    ],
    ids=["copy", "memory"],
)
def test_an_error_in_a_pass_reaches_its_caller_alone(
    serve: Serve,
    alone: Alone,
    monkeypatch: pytest.MonkeyPatch,
    *,
    error: Exception,
    expected: type[Exception],
    message: str,
) -> None:
    engine, compute = serve(), ExpertMlp.__call__
    neighbour = engine.stream(PROMPTS[1], **OPTIONS)
    tokens = [next(neighbour).token_id]
    calls_left = 6  # into the second layer

    def failing(self: ExpertMlp, *arguments: Any, **keywords: Any) -> torch.Tensor:
        nonlocal calls_left
        calls_left -= 1
        if calls_left < 0:
            raise error
        return compute(self, *arguments, **keywords)

    monkeypatch.setattr(ExpertMlp, "__call__", failing)
    with pytest.raises(expected, match=message):
        engine.generate(PROMPTS[0], **OPTIONS)
    monkeypatch.setattr(ExpertMlp, "__call__", compute)
    tokens += [delta.token_id for delta in neighbour]
    assert tuple(tokens) == alone(PROMPTS[1]).token_ids
