"""A trace of the bundled model on held-out text, early routers included, in seconds.

The text of `bench/text` comes with the repository, so whatever replays routing needs no file.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from bench.routing_replay import held_out_streams
from hetero_runtime.planned import plan_for
from hetero_runtime.source import config_from
from hetero_runtime.trace.recorder import Recorded, TraceSettings, record_trace

TEXT = Path(__file__).resolve().parent.parent / "text"
"""A corpus of held-out documents alone."""


def record_bundled(corpus: Path = TEXT, *, length: int, most: int | None = None) -> Recorded:
    """Teacher-forced, on the CPU: the first `length` tokens of every held-out document, of `most` of them at
    most, all kinds in turn. Raises what recording raises."""
    (documents,) = held_out_streams(corpus, num_streams=1)
    settings = TraceSettings(is_teacher_forced=True, cut=length, asks_early=True)
    config = plan_for(config_from(None, {"device": "cpu", "memory": {"residency": 1.0}})).config
    with tempfile.TemporaryDirectory() as folder:
        return record_trace(config, documents[:most], Path(folder) / "bundled.safetensors", settings=settings)
