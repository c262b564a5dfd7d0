"""The same work for many items, in threads: the first error stops the rest and is raised."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import TypeVar

Item = TypeVar("Item")


def run_all(
    work: Callable[[Item, int], object],
    items: Iterable[Item],
    *,
    threads: int,
    done: Callable[[Item], None] = lambda item: None,
) -> None:
    """Call `work(item, worker)` for every item, begun in their order.

    `worker`, 0 to `threads` - 1, is no other running call's: what belongs to it may be used freely. `done`
    is called on the caller's thread after each. Returns, or raises, when no call runs any more.
    """
    free: queue.SimpleQueue[int] = queue.SimpleQueue()
    for worker in range(threads):
        free.put(worker)

    def run_one(item: Item) -> Item:
        worker = free.get()
        try:
            work(item, worker)
        finally:
            free.put(worker)
        return item

    pool = ThreadPoolExecutor(threads, thread_name_prefix="experts")
    try:
        for future in as_completed([pool.submit(run_one, item) for item in items]):
            done(future.result())
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
