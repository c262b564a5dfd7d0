"""The engine under an event loop: the same answers, a free loop, nothing left of a task that ends early."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any

import pytest

from hetero_runtime.generation import Completion
from tests.runtime.engine.serving import LONG, OPTIONS, PROMPTS, Alone, Serve


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
