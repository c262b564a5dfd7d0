"""A kept trace as the recorded routing that the engine's benches replay over random weights.

    python -m bench.traces.replay KEPT.trace.xz routing.safetensors

A trace of 48 layers × 128 experts, top-8, lies on Qwen3-30B-A3B's geometry as it is; on a model of fewer
layers its first ones do. Nothing has to be put together from streams, as with the bundled model's routing.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from bench.routing import RecordedRouting, RoutingFacts
from bench.traces.compact import read_compact
from hetero_runtime.trace import TraceInfo
from hetero_scheduler.trace import Trace


def as_routing(trace: Trace, info: TraceInfo) -> RecordedRouting:
    """One stream: the documents of `trace` end to end."""
    decoding = f"sampled at {info.temperature:g}" if info.decoding == "sampled" else info.decoding
    source = f"{info.model}, {decoding}, {len(trace.bounds) - 1} documents, {trace.num_tokens} tokens"
    return RecordedRouting(trace.topk.astype(np.int64)[None], trace.num_experts, source)


def main(arguments: Sequence[str] | None = None) -> None:
    """Convert, and say what the routing is like."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace", type=Path)
    parser.add_argument("out", type=Path)
    options = parser.parse_args(arguments)
    routing = as_routing(*read_compact(options.trace))
    routing.save(options.out)
    print(f"{routing.source}: {RoutingFacts.of(routing.experts[0], routing.num_experts)}")


if __name__ == "__main__":
    main()
