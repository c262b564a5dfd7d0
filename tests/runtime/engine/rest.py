"""What must hold whenever an engine rests, and what a process holds."""

from __future__ import annotations

import os
import threading
import time

from hetero_runtime.engine import Engine

PATIENCE_S = 10.0


def assert_at_rest(engine: Engine) -> None:
    """No request runs, no slot is lost or held, and every expert that was needed is accounted for."""
    engine.check()
    stats = engine.stats()
    assert stats.active_rows == 0
    assert sum(stats.slots) == engine.config.memory.slabs, stats.slots
    assert stats.slots.compute == 0, stats.slots
    for phase in (stats.prefill, stats.decode):
        cache = phase.cache
        assert cache.required == cache.hits + cache.late + cache.misses, cache
        assert cache.evictions <= cache.loads, cache


def num_open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def engine_threads() -> list[str]:
    """Threads of ours that live, given a moment to end."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        names = [t.name for t in threading.enumerate() if t.name.startswith(("hetero", "expert-read"))]
        if not names or time.monotonic() > deadline:
            return names
        time.sleep(0.01)
