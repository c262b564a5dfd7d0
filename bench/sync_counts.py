"""Counting where the host waits for the device: inside graph replays, where it must not, and elsewhere.

torch raises (mode "error") or warns (mode "warn") at every synchronisation that it knows of. Inside each
replay the mode is "error"; between replays it is "warn", and warnings are counted.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch

_SAID = "synchronizing CUDA operation"
"""What torch says, in errors and warnings."""


@dataclass
class SyncCounts:
    """`in_replays` of `num_replays`, and `elsewhere`."""

    num_replays: int = 0
    in_replays: int = 0
    elsewhere: int = 0


@contextmanager
def syncs_counted() -> Iterator[SyncCounts]:
    """Count while inside; complete when left. For one thread; the mode is left at torch's default."""
    counts, replay = SyncCounts(), torch.cuda.CUDAGraph.replay

    def watched(graph: Any) -> None:
        counts.num_replays += 1
        torch.cuda.set_sync_debug_mode("error")
        try:
            replay(graph)
        except RuntimeError as error:
            if _SAID not in str(error):
                raise
            counts.in_replays += 1
            torch.cuda.set_sync_debug_mode("default")
            replay(graph)  # refused before it was launched
        finally:
            torch.cuda.set_sync_debug_mode("warn")

    with warnings.catch_warnings(record=True) as said, patch.object(torch.cuda.CUDAGraph, "replay", watched):
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield counts
        finally:
            torch.cuda.set_sync_debug_mode("default")
    counts.elsewhere = sum(_SAID in str(warning.message) for warning in said)
