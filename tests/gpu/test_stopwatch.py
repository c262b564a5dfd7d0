"""A stretch of work is timed, and known without waiting for it."""

from __future__ import annotations

import time

import pytest
import torch

from hetero_gpu.stopwatch import Stopwatch, stopwatch_for


def test_on_the_host_a_lap_is_known_at_once() -> None:
    watch: Stopwatch[str] = stopwatch_for(torch.device("cpu"))
    for what in ("a", "b"):
        watch.start()
        time.sleep(0.002)
        watch.stop(what)
    laps = watch.laps()
    assert [lap.what for lap in laps] == ["a", "b"]
    assert all(0.002 <= lap.seconds < 1 for lap in laps)
    assert watch.laps() == []


@pytest.mark.gpu
def test_on_cuda_a_lap_is_known_when_the_device_has_passed_it() -> None:
    watch: Stopwatch[int] = stopwatch_for(torch.device("cuda"))
    for what in range(2):
        watch.start()
        torch.cuda._sleep(20_000_000)
        watch.stop(what)
    assert len(watch.laps()) < 2
    torch.cuda.synchronize()
    left = watch.laps()
    assert left[-1].what == 1
    assert left[-1].seconds > 1e-3
    with pytest.raises(AssertionError, match="stop without start"):
        watch.stop(3)
