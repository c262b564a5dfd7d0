"""Work for many items: each once, no worker twice at a time, and the first error ends it."""

from __future__ import annotations

import threading
import time

import pytest

from hetero_runtime.experts.in_parallel import run_all


def test_each_item_is_worked_on_once_and_told_on_the_callers_thread() -> None:
    worked, told = [], []
    run_all(
        lambda item, worker: worked.append(item),
        range(50),
        threads=4,
        done=lambda item: told.append((item, threading.current_thread())),
    )
    assert sorted(worked) == sorted(item for item, _ in told) == list(range(50))
    assert {thread for _, thread in told} == {threading.current_thread()}


def test_no_worker_is_anybody_elses() -> None:
    busy: set[int] = set()

    def work(item: int, worker: int) -> None:
        assert worker in range(3) and worker not in busy
        busy.add(worker)
        time.sleep(0.001)
        busy.remove(worker)

    run_all(work, range(30), threads=3)


def test_the_first_error_stops_the_rest() -> None:
    num_threads, worked = threading.active_count(), []

    def work(item: int, worker: int) -> None:
        if item == 2:
            raise ValueError("the second")
        time.sleep(0.001)
        worked.append(item)

    with pytest.raises(ValueError, match="the second"):
        run_all(work, range(1000), threads=2)
    assert len(worked) < 900
    assert threading.active_count() == num_threads
