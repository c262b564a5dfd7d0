"""A trace small enough to be kept in a repository: what was chosen, and how strongly.

    python -m bench.traces.compact TRACE.safetensors KEPT.trace.xz --megabytes 2
    python -m bench.traces.compact KEPT.trace.xz TRACE.safetensors

A token of 48 layers × 128 experts has 12 KB of router logits, of which a cache needs none and a predictor
those of the 8 experts that were chosen (`hetero_scheduler/predict/activation.py`). Kept are, a layer:

    experts    ascending, each as its distance from the one before       uint8   ┐ one xz stream, field after
    strengths  how far its logit lies below the layer's best, × 16       uint8   ┘ field, token ids last

That is about half a kilobyte a token. Choices come back exactly, logits of the chosen to 1/32, those of the
others are gone: they come back as one low value, so a policy that ranks experts which were nearly chosen
(`persistence` beyond k) finds nothing to rank. Documents are dropped from the end until the file fits.
"""

from __future__ import annotations

import argparse
import json
import lzma
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from hetero_runtime.trace import TraceInfo, read_trace, write_trace
from hetero_runtime.whole_file import write_whole
from hetero_scheduler.trace import Trace

FORMAT = "bench.traces.compact/1"
STEPS = 16
"""Steps of a strength in one unit of logit."""
NOT_CHOSEN = -64.0
"""Logit of an expert that was not chosen, below every strength."""
_TRIES = 6


def compress(trace: Trace, info: TraceInfo) -> bytes:
    """The whole of `trace`. Raises ValueError for more than 256 experts or 65,536 token ids."""
    if trace.num_experts > 256 or trace.tokens.max() > np.iinfo(np.uint16).max:
        raise ValueError(
            f"{trace.num_experts} experts and token {trace.tokens.max()} do not fit in few bytes"
        )
    experts = np.sort(trace.topk.astype(np.int64), axis=-1)  # [T, L, K]
    logits = np.take_along_axis(trace.logits, experts, axis=-1).astype(np.float32)
    below = logits.max(axis=-1, keepdims=True) - logits
    strengths = np.clip(np.rint(STEPS * below), 0, 255).astype(np.uint8)
    gaps = np.diff(experts, axis=-1, prepend=0).astype(np.uint8)
    header = {
        "format": FORMAT,
        "trace": asdict(info),
        "shape": [*trace.topk.shape, trace.num_experts],
        "bounds": trace.bounds.tolist(),
    }
    parts = [gaps.tobytes(), strengths.tobytes(), trace.tokens.astype("<u2").tobytes()]
    return lzma.compress(json.dumps(header).encode() + b"\n" + b"".join(parts), preset=9)


def decompress(content: bytes) -> tuple[Trace, TraceInfo]:
    """What `compress` was given, as far as it was kept. Raises ValueError for anything else."""
    line, _, body = lzma.decompress(content).partition(b"\n")
    header: dict[str, Any] = json.loads(line)
    if header.get("format") != FORMAT:
        raise ValueError(f"format is {header.get('format')!r}, not {FORMAT!r}")
    tokens, layers, top_k, num_experts = header["shape"]
    size = tokens * layers * top_k
    gaps, strengths = (
        np.frombuffer(body, np.uint8, size, size * i).reshape(tokens, layers, top_k) for i in range(2)
    )
    experts = np.cumsum(gaps, axis=-1, dtype=np.int64)
    logits = np.full((tokens, layers, num_experts), NOT_CHOSEN, dtype=np.float16)
    np.put_along_axis(logits, experts, (strengths / -STEPS).astype(np.float16), axis=-1)
    best_first = np.take_along_axis(experts, np.argsort(strengths, axis=-1, kind="stable"), axis=-1)
    ids = np.frombuffer(body, "<u2", tokens, 2 * size).astype(np.int32)
    trace = Trace(logits, best_first.astype(np.int16), ids, np.array(header["bounds"], dtype=np.int64))
    return trace, TraceInfo(**header["trace"])


def first_documents(trace: Trace, count: int) -> Trace:
    """The first `count` documents of `trace`."""
    end = int(trace.bounds[count])
    return Trace(trace.logits[:end], trace.topk[:end], trace.tokens[:end], trace.bounds[: count + 1])


def trim(trace: Trace, info: TraceInfo, budget: int) -> bytes:
    """As many of the first documents as compress into `budget` bytes.

    Raises ValueError when not even one does.
    """
    count = len(trace.bounds) - 1
    for _ in range(_TRIES):
        content = compress(first_documents(trace, count), info)
        if len(content) <= budget:
            return content
        count = max(1, min(count - 1, int(count * 0.98 * budget / len(content))))
    raise ValueError(f"{count} documents take {len(content)} bytes, more than {budget}")


def write_compact(path: Path, content: bytes) -> None:
    """Write atomically."""
    write_whole(path, lambda unfinished: unfinished.write_bytes(content))


def read_compact(path: Path) -> tuple[Trace, TraceInfo]:
    """A trace that this module wrote, or a whole one. Raises ValueError or CheckpointError."""
    return read_trace(path) if path.suffix == ".safetensors" else decompress(path.read_bytes())


def main(arguments: Sequence[str] | None = None) -> None:
    """Trim one trace, or make a kept one whole for what reads trace files."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--megabytes", type=float, default=2.0, help="of a kept trace, at most")
    options = parser.parse_args(arguments)
    trace, info = read_compact(options.trace)
    if options.out.suffix == ".safetensors":
        write_trace(options.out, trace, info)
        return
    content = trim(trace, info, int(options.megabytes * 1e6))
    write_compact(options.out, content)
    kept, _ = decompress(content)
    print(
        f"{options.out.name}: {kept.num_tokens:,} of {trace.num_tokens:,} tokens, {len(kept.bounds) - 1} "
        f"documents, {len(content) / 1e6:.2f} MB, {len(content) / kept.num_tokens:.0f} bytes a token"
    )


if __name__ == "__main__":
    main()
