"""The end of an engine: requests end as cancelled, nobody is waited for, and all memory is given back."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from hetero_runtime.errors import RequestCancelled, RequestError
from hetero_scheduler import ExpertKey
from tests.runtime.engine.conftest import MakeCheckpoint
from tests.runtime.engine.rest import PATIENCE_S, assert_at_rest, engine_threads, num_open_files
from tests.runtime.engine.serving import LONG, OPTIONS, PROMPTS, load


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


def bytes_on_device(device: str) -> int:
    if device != "cuda":
        return 0
    torch._C._cuda_clearCublasWorkspaces()  # type: ignore[attr-defined]  # one for each thread that multiplied
    return torch.cuda.memory_allocated()


def test_close_gives_everything_back(checkpoint: MakeCheckpoint, device: str) -> None:
    with load(checkpoint("Qwen3Moe"), device) as first:  # what libraries allocate once for the process
        first.generate(PROMPTS[0], **OPTIONS)
    gc.collect()
    num_files = num_open_files()
    allocated = bytes_on_device(device)
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
    assert bytes_on_device(device) <= allocated
    del engine, parts, record
    gc.collect()
    assert bank() is None
