"""A generator in a thread, read from asyncio: order, errors, leaving early, nothing left behind."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from hetero_runtime.errors import RequestCancelled
from hetero_runtime.generation.async_bridge import iterate_in_thread
from hetero_runtime.generation.request import CancelToken

WAIT_S = 10.0


@pytest.fixture
def executor() -> Iterator[ThreadPoolExecutor]:
    """One worker, so that a generator that was left behind would block the next test step."""
    with ThreadPoolExecutor(max_workers=1) as pool:
        yield pool


class Counter:
    """Counts without end; remembers the threads it ran in and whether it was closed."""

    def __init__(self, limit: int = 10**9, fail_at: int = -1) -> None:
        self.limit, self.fail_at = limit, fail_at
        self.num_made = 0
        self.threads: set[int] = set()
        self.closed = threading.Event()

    def __call__(self) -> Generator[int, None, None]:
        try:
            for i in range(self.limit):
                self.threads.add(threading.get_ident())
                if i == self.fail_at:
                    raise OSError(f"step {i} failed")
                self.num_made += 1
                yield i
        finally:
            self.threads.add(threading.get_ident())
            self.closed.set()


def run(main: Callable[[], Any]) -> None:
    """Run `main()` in a fresh loop whose exception handler fails the test."""
    unhandled: list[dict[str, Any]] = []

    async def guarded() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: unhandled.append(context))
        await asyncio.wait_for(main(), WAIT_S)

    asyncio.run(guarded())
    assert unhandled == []


def test_all_items_in_order_in_one_other_thread(executor: ThreadPoolExecutor) -> None:
    counter = Counter(limit=300)

    async def main() -> None:
        assert [i async for i in iterate_in_thread(counter, executor, num_ahead=4)] == list(range(300))

    run(main)
    assert counter.closed.is_set()
    assert len(counter.threads) == 1
    assert threading.get_ident() not in counter.threads


def test_none_is_an_item(executor: ThreadPoolExecutor) -> None:
    async def main() -> None:
        items = [i async for i in iterate_in_thread(lambda: (None for _ in range(3)), executor)]
        assert items == [None, None, None]

    run(main)


def test_error_comes_after_the_items_before_it(executor: ThreadPoolExecutor) -> None:
    counter = Counter(fail_at=3)

    async def main() -> None:
        items = iterate_in_thread(counter, executor)
        assert [await anext(items) for _ in range(3)] == [0, 1, 2]
        with pytest.raises(OSError, match="step 3 failed"):
            await anext(items)

    run(main)
    assert counter.closed.is_set()


def test_error_while_making_the_generator(executor: ThreadPoolExecutor) -> None:
    def refuse() -> Generator[int, None, None]:
        raise ValueError("no such prompt")

    async def main() -> None:
        with pytest.raises(ValueError, match="no such prompt"):
            await anext(iterate_in_thread(refuse, executor))

    run(main)


def test_a_slow_reader_holds_the_generator_back(executor: ThreadPoolExecutor) -> None:
    counter = Counter()

    async def main() -> None:
        async with contextlib.aclosing(iterate_in_thread(counter, executor, num_ahead=3)) as items:
            assert await anext(items) == 0
            await asyncio.sleep(0.05)
            assert counter.num_made <= 5  # one read, three waiting, one in hand

    run(main)
    assert counter.closed.is_set()


def test_the_loop_stays_free(executor: ThreadPoolExecutor) -> None:
    release = threading.Event()

    def blocked() -> Generator[int, None, None]:
        release.wait(WAIT_S)
        yield 1

    async def main() -> None:
        item = asyncio.ensure_future(anext(iterate_in_thread(blocked, executor)))
        for _ in range(3):
            await asyncio.sleep(0)
        release.set()
        assert await item == 1

    run(main)


def test_aclose_closes_the_generator_before_it_returns(executor: ThreadPoolExecutor) -> None:
    counter, token = Counter(), CancelToken()

    async def main() -> None:
        items = iterate_in_thread(counter, executor, cancel=token)
        assert await anext(items) == 0
        await items.aclose()
        assert counter.closed.is_set()

    run(main)
    assert token.is_cancelled
    assert len(counter.threads) == 1


def test_break_closes_the_generator_soon(executor: ThreadPoolExecutor) -> None:
    counter = Counter()

    async def main() -> None:
        async for i in iterate_in_thread(counter, executor):
            if i == 5:
                break
        assert await asyncio.to_thread(counter.closed.wait, WAIT_S)

    run(main)


def test_cancelled_task_interrupts_a_long_step(executor: ThreadPoolExecutor) -> None:
    token, started, closed = CancelToken(), threading.Event(), threading.Event()

    def prefill() -> Generator[int, None, None]:
        try:
            started.set()
            while not token.is_cancelled:
                closed.wait(0.001)
            raise RequestCancelled("cancelled in prefill")
            yield 0
        finally:
            closed.set()

    async def main() -> None:
        task = asyncio.ensure_future(anext(iterate_in_thread(prefill, executor, cancel=token)))
        await asyncio.to_thread(started.wait, WAIT_S)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert closed.is_set()

    run(main)


def test_finished_stream_does_not_cancel(executor: ThreadPoolExecutor) -> None:
    token = CancelToken()

    async def main() -> None:
        assert [i async for i in iterate_in_thread(Counter(limit=2), executor, cancel=token)] == [0, 1]

    run(main)
    assert not token.is_cancelled


def test_left_before_its_turn_it_is_never_made(executor: ThreadPoolExecutor) -> None:
    first, second = Counter(), Counter()

    async def main() -> None:
        async with contextlib.aclosing(iterate_in_thread(first, executor)) as items:
            await anext(items)
            waiting = asyncio.ensure_future(anext(iterate_in_thread(second, executor)))
            await asyncio.sleep(0.01)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
        assert [i async for i in iterate_in_thread(Counter(limit=2), executor)] == [0, 1]

    run(main)
    assert first.closed.is_set()
    assert second.threads == set()


def test_executor_that_drops_its_queue_is_an_error() -> None:
    pool, first = ThreadPoolExecutor(max_workers=1), Counter()

    async def main() -> None:
        async with contextlib.aclosing(iterate_in_thread(first, pool)) as items:
            await anext(items)
            waiting = asyncio.ensure_future(anext(iterate_in_thread(Counter(), pool)))
            await asyncio.sleep(0.01)
            pool.shutdown(wait=False, cancel_futures=True)
            with pytest.raises(RequestCancelled, match="closed before the request began"):
                await waiting

    run(main)


def test_error_after_the_reader_left_reaches_the_loop(executor: ThreadPoolExecutor) -> None:
    contexts: list[dict[str, Any]] = []

    def bad_close() -> Generator[int, None, None]:
        try:
            while True:
                yield 0
        finally:
            raise OSError("close failed")

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: contexts.append(context))
        items = iterate_in_thread(bad_close, executor)
        await anext(items)
        await items.aclose()

    asyncio.run(main())
    assert [str(context["exception"]) for context in contexts] == ["close failed"]


def test_many_readers_at_once() -> None:
    counters = [Counter() for _ in range(16)]

    async def read(counter: Counter, pool: ThreadPoolExecutor) -> None:
        async with contextlib.aclosing(iterate_in_thread(counter, pool, num_ahead=2)) as items:
            async for i in items:
                if i == 20:
                    break

    async def main(pool: ThreadPoolExecutor) -> None:
        await asyncio.gather(*(read(counter, pool) for counter in counters))
        assert all(counter.closed.is_set() for counter in counters)

    with ThreadPoolExecutor(max_workers=4) as pool:
        run(lambda: main(pool))
