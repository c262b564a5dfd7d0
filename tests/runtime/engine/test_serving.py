"""One engine and many callers: each gets what it would get alone, and whatever ends early leaves nothing."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
import torch

from hetero_runtime.engine import Engine
from hetero_runtime.errors import DeviceError, RequestCancelled, RequestError
from hetero_runtime.experts.compute import ExpertMlp
from hetero_runtime.generation import CancelToken, Completion
from hetero_scheduler import ExpertKey
from tests.architectures import prompt_ids
from tests.runtime.engine.conftest import MakeCheckpoint
from tests.runtime.engine.rest import PATIENCE_S, assert_at_rest, engine_threads, num_open_files

PROMPTS = [prompt_ids(5 + 7 * seed, seed=seed)[0].tolist() for seed in range(8)]
NUM_MOE_LAYERS = 3
NUM_TOKENS = 24
OPTIONS: dict[str, Any] = {"max_tokens": NUM_TOKENS, "ignore_eos": True}
LONG: dict[str, Any] = {"max_tokens": 200, "ignore_eos": True}

Alone = Callable[..., Completion]
Serve = Callable[..., Engine]


def load(folder: Path, device: str, *, max_rows: int = 2, **memory: Any) -> Engine:
    return Engine.load(
        folder, device=device, memory=memory or {"residency": 0.25}, execution={"max_rows": max_rows}
    )


@pytest.fixture
def alone(checkpoint: MakeCheckpoint, device: str) -> Iterator[Alone]:
    """`alone(prompt, **options)`: what an engine says that serves nobody else and holds all experts."""
    with load(checkpoint("Qwen3Moe"), device, slabs="all") as engine:
        yield lambda prompt, **options: engine.generate(prompt, **{**OPTIONS, **options})


@pytest.fixture
def serve(checkpoint: MakeCheckpoint, device: str, alone: Alone) -> Iterator[Serve]:
    """`serve(max_rows=2)`: an engine that after the test is at rest and still serves."""
    engines: list[Engine] = []

    def start(**options: Any) -> Engine:
        engines.append(load(checkpoint("Qwen3Moe"), device, **options))
        return engines[-1]

    yield start
    for engine in engines:
        assert_at_rest(engine)
        assert engine.generate(PROMPTS[0], **OPTIONS).token_ids == alone(PROMPTS[0]).token_ids
        engine.close()
    assert engine_threads() == []


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


# ---- asyncio


def test_agenerate_serves_many_tasks_and_leaves_the_loop_free(serve: Serve, alone: Alone) -> None:
    engine = serve()
    num_ticks = 0

    async def tick() -> None:
        nonlocal num_ticks
        while True:
            await asyncio.sleep(0.001)
            num_ticks += 1

    async def main() -> list[Completion]:
        ticking = asyncio.create_task(tick())
        completions = await asyncio.gather(*(engine.agenerate(prompt, **OPTIONS) for prompt in PROMPTS))
        ticking.cancel()
        return completions

    completions = asyncio.run(main())
    assert [c.token_ids for c in completions] == [alone(prompt).token_ids for prompt in PROMPTS]
    assert num_ticks > 5


def test_astream_gives_the_same_deltas_as_stream(serve: Serve) -> None:
    engine = serve()

    async def main() -> list[Any]:
        return [delta async for delta in engine.astream(PROMPTS[2], **OPTIONS)]

    assert asyncio.run(main()) == list(engine.stream(PROMPTS[2], **OPTIONS))


def test_as_many_streams_as_rows_can_be_read_side_by_side(serve: Serve) -> None:
    """Each has its own thread: one that runs ahead of its reader does not keep another from starting."""
    engine = serve(max_rows=12)

    async def main() -> None:
        streams = [engine.astream(PROMPTS[0], **LONG) for _ in range(12)]
        for _ in range(4):
            tokens = {(await anext(stream)).token_id for stream in streams}
            assert len(tokens) == 1
        for stream in streams:
            await stream.aclose()

    asyncio.run(main())


def test_cancelling_a_task_ends_its_request(serve: Serve) -> None:
    engine = serve()

    async def main() -> None:
        task = asyncio.create_task(engine.agenerate(PROMPTS[0], **LONG))
        while not engine.stats().prefill.passes:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert engine.stats().active_rows == 0

    asyncio.run(main())
    assert engine.stats().decode.tokens < LONG["max_tokens"] - 1


def test_leaving_an_astream_early_ends_its_request(serve: Serve) -> None:
    engine = serve(max_rows=1)

    async def main() -> None:
        async with aclosing(engine.astream(PROMPTS[0], **LONG)) as stream:
            async for _ in stream:
                break
        assert engine.stats().active_rows == 0

    asyncio.run(main())


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
            r"the host has no room for a pass over 5 tokens \(DefaultCPUAllocator: .* 7 bytes\); lower memory",
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

    def failing(self: ExpertMlp, *arguments: Any) -> torch.Tensor:
        nonlocal calls_left
        calls_left -= 1
        if calls_left < 0:
            raise error
        return compute(self, *arguments)

    monkeypatch.setattr(ExpertMlp, "__call__", failing)
    with pytest.raises(expected, match=message):
        engine.generate(PROMPTS[0], **OPTIONS)
    monkeypatch.setattr(ExpertMlp, "__call__", compute)
    tokens += [delta.token_id for delta in neighbour]
    assert tuple(tokens) == alone(PROMPTS[1]).token_ids


# ---- close


def test_close_ends_running_requests(checkpoint: MakeCheckpoint, device: str) -> None:
    engine = load(checkpoint("Qwen3Moe"), device, max_rows=3)
    has_begun = threading.Barrier(4)

    def ask() -> str | None:
        reasons = []
        for delta in engine.stream(PROMPTS[0], **LONG):
            if not reasons:
                has_begun.wait(PATIENCE_S)
            reasons.append(delta.finish_reason)
        return reasons[-1]

    with ThreadPoolExecutor(3) as pool:
        answers = [pool.submit(ask) for _ in range(3)]
        has_begun.wait(PATIENCE_S)
        engine.close()
        assert [answer.result(PATIENCE_S) for answer in answers] == ["cancelled"] * 3
    assert_at_rest(engine)


def test_close_does_not_wait_for_a_stream_that_nobody_reads(checkpoint: MakeCheckpoint, device: str) -> None:
    engine = load(checkpoint("Qwen3Moe"), device)
    begun, fresh = engine.stream(PROMPTS[0], **LONG), engine.stream(PROMPTS[1], **LONG)
    next(begun)
    engine.close()
    assert [delta.finish_reason for delta in begun] == ["cancelled"]
    assert [delta.finish_reason for delta in fresh] == ["cancelled"]
    assert_at_rest(engine)


def test_close_from_the_event_loop_while_tasks_run(checkpoint: MakeCheckpoint, device: str) -> None:
    engine = load(checkpoint("Qwen3Moe"), device)

    async def main() -> list[Any]:
        slow = engine.astream(PROMPTS[0], **LONG)
        await anext(slow)
        tasks = [asyncio.create_task(engine.agenerate(PROMPTS[0], **LONG)) for _ in range(3)]
        await asyncio.sleep(0.05)
        engine.close()
        await slow.aclose()
        return await asyncio.gather(*tasks, return_exceptions=True)

    results = asyncio.run(main())
    assert all(
        isinstance(result, RequestCancelled) or result.finish_reason == "cancelled" for result in results
    )
    assert engine_threads() == []


def test_after_close_requests_are_refused_and_state_can_still_be_read(
    checkpoint: MakeCheckpoint, device: str
) -> None:
    engine = load(checkpoint("Qwen3Moe"), device)
    made_before = engine.astream(PROMPTS[0], **OPTIONS)
    engine.close()
    engine.close()
    for ask in (engine.generate, engine.stream, engine.astream):
        with pytest.raises(RequestError, match=r"the engine is closed; load a new one"):
            ask(PROMPTS[0], **OPTIONS)
    with pytest.raises(RequestError, match=r"the engine is closed"):
        asyncio.run(engine.agenerate(PROMPTS[0], **OPTIONS))
    with pytest.raises(RequestCancelled, match=r"closed before the request began"):
        asyncio.run(anext(made_before))
    assert engine.stats().requests == 0
    engine.check()


def test_close_gives_everything_back(checkpoint: MakeCheckpoint, device: str) -> None:
    gc.collect()
    num_files = num_open_files()
    allocated = torch.cuda.memory_allocated() if device == "cuda" else 0
    engine = load(checkpoint("Qwen3Moe"), device)
    asyncio.run(engine.agenerate(PROMPTS[0], **OPTIONS))
    parts = engine._parts
    record = parts.store.record(ExpertKey(0, 0))
    assert record.any()
    weights = [weakref.ref(weight) for weight in parts.model.parameters() if not weight.is_meta]
    slabs, bank = weakref.ref(parts.slabs.memory), weakref.ref(parts.store._bank)
    engine.close()
    # while the engine object still lives
    assert slabs() is None
    assert len(weights) > 20
    assert not any(weight() is not None for weight in weights)
    assert not record.any(), "the pages of the bank are still there"
    assert engine_threads() == []
    assert num_open_files() == num_files
    if device == "cuda":
        assert torch.cuda.memory_allocated() <= allocated
    del engine, parts, record
    gc.collect()
    assert bank() is None
