"""Foresight: routers are listened to, a predictor says what comes, copies and evictions follow it.

    router of l ── logits ─► rows.py: this text's predictor ── forecast ─► steering (scheduler package)
                                                                            │ tasks        │ scores
    eager orchestrator ── "the loads of l are submitted" ─► prefetcher.py ◄─┘              └─► eviction
                                                            what the link can carry meanwhile

The policies are those that the simulator replays; here are only the parts that know rows, time and copies.
"""

from __future__ import annotations

from hetero_runtime.foresight.foresight import Foresight
from hetero_runtime.foresight.sequences import ForeseenSequences

__all__ = ["ForeseenSequences", "Foresight"]
