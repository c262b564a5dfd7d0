"""A blocking generator, iterated from asyncio.

The generator runs in one worker thread from its first step to its `close()`, because what it does
inside may belong to a thread (CUDA streams, `torch.inference_mode`). Items cross to the event loop:

    worker thread                                event loop
    for item in generator:   -- item -->         receive() -> yield item
        wait for room        <-- room --
    generator.close()        <-- leave --        reader left early: cancel, then wait for END
    done                     -- END -->
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncGenerator, Callable, Generator
from concurrent.futures import Executor, Future
from enum import Enum
from typing import Generic, TypeVar

from hetero_runtime.errors import RequestCancelled
from hetero_runtime.generation.request import CancelToken

T = TypeVar("T")

NUM_AHEAD = 64
"""Most items that wait for a slow reader before the generator has to wait, too."""


class _Mark(Enum):
    END = "the worker is done"


async def iterate_in_thread(
    make_iterator: Callable[[], Generator[T, None, None]],
    executor: Executor,
    *,
    cancel: CancelToken | None = None,
    num_ahead: int = NUM_AHEAD,
) -> AsyncGenerator[T, None]:
    """Yield what `make_iterator()` yields, running it in a thread of `executor`; raise what it raises.

    When the reader leaves early (`aclose`, a cancelled task, `break`), `cancel` is set so that a
    long step can give up, and the generator is closed in its own thread before the reader goes on.
    `break` alone lets the event loop do this a moment later: use `contextlib.aclosing` to wait for it.
    A generator whose turn in the executor has not come is never made.
    """
    channel: _Channel[T] = _Channel(asyncio.get_running_loop(), num_ahead)
    try:
        worker = executor.submit(channel.pump, make_iterator)
    except RuntimeError as error:  # how an executor that was shut down refuses
        raise RequestCancelled("the engine was closed before the request began") from error
    worker.add_done_callback(lambda _: channel.post(_Mark.END))
    try:
        while not isinstance(item := await channel.receive(), _Mark):
            yield item
    except BaseException:
        if cancel is not None:
            cancel.cancel()
        channel.leave()
        await _wait_for_end(worker, channel)
        raise
    if worker.cancelled():
        raise RequestCancelled("the engine was closed before the request began")
    worker.result()


async def _wait_for_end(worker: Future[None], channel: _Channel[T]) -> None:
    """Let the worker close its generator; an error nobody waits for goes to the loop's handler."""
    worker.cancel()  # when its turn has not come, it never will
    while await channel.receive() is not _Mark.END:
        pass
    error = None if worker.cancelled() else worker.exception()
    if error is not None and not isinstance(error, RequestCancelled):
        context = {"message": "a generator failed after its reader had left", "exception": error}
        asyncio.get_running_loop().call_exception_handler(context)


class _Channel(Generic[T]):
    """Items from the worker thread to the event loop, with bounded room."""

    def __init__(self, loop: asyncio.AbstractEventLoop, num_ahead: int) -> None:
        self._loop = loop
        self._items: asyncio.Queue[T | _Mark] = asyncio.Queue()
        self._room = threading.Semaphore(num_ahead)
        self._has_left = threading.Event()

    def pump(self, make_iterator: Callable[[], Generator[T, None, None]]) -> None:
        """Worker: run the generator to its end, or until the reader has left; then close it."""
        with contextlib.closing(make_iterator()) as iterator:
            for item in iterator:
                self._room.acquire()
                if self._has_left.is_set():
                    return
                self.post(item)

    def post(self, item: T | _Mark) -> None:
        """Worker: hand one item to the loop."""
        try:
            self._loop.call_soon_threadsafe(self._items.put_nowait, item)
        except RuntimeError:  # the loop is closed: nobody will ever read
            self._has_left.set()

    async def receive(self) -> T | _Mark:
        """Reader: the next item, in order."""
        item = await self._items.get()
        self._room.release()
        return item

    def leave(self) -> None:
        """Reader: no more items are wanted; wakes a worker that waits for room."""
        self._has_left.set()
        self._room.release()
