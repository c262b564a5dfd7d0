"""Counting where the host waits for the device: while steps are submitted, where it must not, and elsewhere.

torch warns at every synchronisation that it knows of (mode "warn"); warnings are counted. What is submitted
is a round of `GraphSequences`: replays of the captured step, each with its sampling, and the copies between.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from unittest.mock import patch

import torch

from hetero_runtime.hf.graph_sequences import GraphSequences, StepPlan, Submitted

_SAID = "synchronizing CUDA operation"
"""What torch says, in errors and warnings."""


@dataclass
class SyncCounts:
    """`in_submissions` of `num_steps` steps, and `elsewhere`."""

    num_steps: int = 0
    in_submissions: int = 0
    elsewhere: int = 0


@contextmanager
def syncs_counted() -> Iterator[SyncCounts]:
    """Count while inside; complete when left. For one thread; the mode is left at torch's default."""
    counts, submit = SyncCounts(), GraphSequences.submit

    def watched(sequences: GraphSequences, plan: StepPlan) -> Submitted:
        before = _num_syncs(said)
        submitted = submit(sequences, plan)
        counts.num_steps += len(plan.active)
        counts.in_submissions += _num_syncs(said) - before
        return submitted

    with warnings.catch_warnings(record=True) as said, patch.object(GraphSequences, "submit", watched):
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield counts
        finally:
            torch.cuda.set_sync_debug_mode("default")
    counts.elsewhere = _num_syncs(said) - counts.in_submissions


def _num_syncs(said: list[warnings.WarningMessage]) -> int:
    return sum(_SAID in str(warning.message) for warning in said)
