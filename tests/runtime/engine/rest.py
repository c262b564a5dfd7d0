"""What must hold whenever an engine rests, and what a process holds."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import pytest

from hetero_runtime.engine import Engine
from hetero_runtime.experts.bank import HostBank

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
        names = [t.name for t in threading.enumerate() if t.name.startswith(("hetero", "expert-"))]
        if not names or time.monotonic() > deadline:
            return names
        time.sleep(0.01)


class Banks:
    """Every host bank that was made, so that none is left."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._made: list[HostBank] = []
        make = HostBank.__init__

        def making(bank: HostBank, num_bytes: int, **options: Any) -> None:
            make(bank, num_bytes, **options)
            self._made.append(bank)

        monkeypatch.setattr(HostBank, "__init__", making)

    @property
    def num_made(self) -> int:
        return len(self._made)

    @property
    def num_open(self) -> int:
        return sum(bank._bytes is not None for bank in self._made)
