"""The most memory that this process held, from a moment on, beside what a plan said.

The kernel counts what this process touched (`VmHWM`), which a GPU's driver may keep its own pages out of; so
what the whole machine had less is followed too, and that counts everybody.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import NamedTuple, Self

import psutil
import torch

from hetero_runtime.own_memory import status_bytes

LOOK_S = 0.02
_WARM = 512


class PeakMemory(NamedTuple):
    """Bytes. `rss`: what this process held more than at the beginning, `machine`: what was available less."""

    rss: int
    machine: int
    device: int
    """Of a GPU's own memory, as torch allocated it; 0 without one."""


class MemoryWatch:
    """Watches from its beginning on; `end` says what was most.

    What libraries take when a GPU is first used is no model's: it is taken before.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        if self._is_cuda:
            square = torch.ones(_WARM, _WARM, dtype=torch.bfloat16, device=device)
            torch.mm(square, square).cpu()
            del square
            torch.cuda.reset_peak_memory_stats(device)
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # the peak starts again from here
        self._rss, self._available = status_bytes("VmRSS"), psutil.virtual_memory().available
        self._least_available = self._available
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, name="memory-watch", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def peak(self) -> PeakMemory:
        """Since the beginning."""
        return PeakMemory(
            rss=max(0, status_bytes("VmHWM") - self._rss),
            machine=self._available - self._least_available,
            device=torch.cuda.max_memory_allocated() if self._is_cuda else 0,
        )

    def _look(self) -> None:
        while not self._ended.wait(LOOK_S):
            self._least_available = min(self._least_available, psutil.virtual_memory().available)
