"""A trace small enough to be kept in a repository: what was chosen, and how strongly.

    python -m bench.traces.compact TRACE.safetensors KEPT.trace.xz --megabytes 2 [--early]
    python -m bench.traces.compact KEPT.trace.xz TRACE.safetensors

A token of 48 layers × 128 experts has 12 KB of router logits, of which a cache needs none and a predictor
those of the 8 experts that were chosen (`hetero_scheduler/predict/activation.py`). Kept are, a layer:

    experts    ascending, each as its distance from the one before       uint8   ┐ one xz stream, field after
    strengths  how far its logit lies below the layer's best, × 16       uint8   ┘ field, token ids last
    early      of what routers say early, the k + 3 best the same way    uint8   │ (with `--early`)
    rest       what the others' logits come to, as a strength            uint8   ┘

That is about half a kilobyte a token, with `early` more than twice as much. Choices come back exactly, logits
of the chosen to 1/32, those of the others are gone: they come back as one low value, so a policy that ranks
experts which were nearly chosen (`persistence` beyond k) finds nothing to rank. What routers say early is
ranked and weighed, so there the others come back alike, with the share that they had together. Documents are
dropped from the end until the file fits.
"""

from __future__ import annotations

import argparse
import json
import lzma
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hetero_runtime.trace import TraceInfo, read_trace, write_trace
from hetero_runtime.whole_file import write_whole
from hetero_scheduler.trace import Trace

FORMAT = "bench.traces.compact/1"
STEPS = 16
"""Steps of a strength in one unit of logit."""
NOT_CHOSEN = -64.0
"""Logit of an expert that was not chosen, below every strength."""
EARLY_BEYOND = 3
"""Experts kept of an early router beyond the k that are chosen: what is prefetched."""
_TRIES = 6

Halves = npt.NDArray[np.float16]


def compress(trace: Trace, info: TraceInfo, *, keeps_early: bool = False) -> bytes:
    """The whole of `trace`.

    Raises ValueError for more than 256 experts or 65,536 token ids, and for `keeps_early` where the trace
    holds no `early`.
    """
    if trace.num_experts > 256 or trace.tokens.max() > np.iinfo(np.uint16).max:
        raise ValueError(
            f"{trace.num_experts} experts and token {trace.tokens.max()} do not fit in few bytes"
        )
    num_early = min(trace.top_k + EARLY_BEYOND, trace.num_experts) if keeps_early else 0
    header = {
        "format": FORMAT,
        "trace": asdict(info),
        "shape": [*trace.topk.shape, trace.num_experts],
        "num_early": num_early,
        "bounds": trace.bounds.tolist(),
    }
    parts = [*_coded(trace.logits, trace.topk.astype(np.int64)), trace.tokens.astype("<u2")]
    if num_early:
        if trace.early is None:
            raise ValueError("the trace does not hold what routers say when they are asked early")
        parts += _coded_early(trace.early, num_early)
    body = b"".join(part.tobytes() for part in parts)
    return lzma.compress(json.dumps(header).encode() + b"\n" + body, preset=9)


def decompress(content: bytes) -> tuple[Trace, TraceInfo]:
    """What `compress` was given, as far as it was kept. Raises ValueError for anything else."""
    line, _, body = lzma.decompress(content).partition(b"\n")
    header: dict[str, Any] = json.loads(line)
    if header.get("format") != FORMAT:
        raise ValueError(f"format is {header.get('format')!r}, not {FORMAT!r}")
    tokens, layers, top_k, num_experts = header["shape"]
    fields = _Fields(body)
    kept = fields.ranked((tokens, layers, top_k))
    ids = fields.take("<u2", (tokens,)).astype(np.int32)
    trace = Trace(
        logits=kept.laid_out(num_experts, np.float16(NOT_CHOSEN)),
        topk=kept.best_first().astype(np.int16),
        tokens=ids,
        bounds=np.array(header["bounds"], dtype=np.int64),
        early=_decoded_early(fields, (tokens, layers, header["num_early"]), num_experts),
    )
    return trace, TraceInfo(**header["trace"])


class _Ranked(NamedTuple):
    """The best experts of every layer, ascending, and how far each lies below the best of all."""

    experts: npt.NDArray[np.int64]  # [tokens, layers, n]
    strengths: npt.NDArray[np.uint8]  # [tokens, layers, n]

    def laid_out(self, num_experts: int, others: npt.ArrayLike) -> Halves:
        """As logits; every expert that is not among them has `others`, one value or one a layer."""
        shape = (*self.experts.shape[:2], num_experts)
        logits: Halves = np.broadcast_to(np.asarray(others, dtype=np.float16), shape).copy()
        np.put_along_axis(logits, self.experts, _as_logits(self.strengths), axis=-1)
        return logits

    def best_first(self) -> npt.NDArray[np.int64]:
        order = np.argsort(self.strengths, axis=-1, kind="stable")
        return np.take_along_axis(self.experts, order, axis=-1)


class _Fields:
    """The arrays of a file, one after the other."""

    def __init__(self, body: bytes) -> None:
        self._body, self._read = body, 0

    def take(self, dtype: str, shape: tuple[int, ...]) -> npt.NDArray[Any]:
        """The next array."""
        taken = np.frombuffer(self._body, dtype, math.prod(shape), self._read).reshape(shape)
        self._read += taken.nbytes
        return taken

    def ranked(self, shape: tuple[int, ...]) -> _Ranked:
        """What `_coded` wrote, `[tokens, layers, n]`."""
        gaps, strengths = self.take("u1", shape), self.take("u1", shape)
        return _Ranked(np.cumsum(gaps, axis=-1, dtype=np.int64), strengths)


def _coded(logits: Halves, experts: npt.NDArray[np.int64]) -> list[npt.NDArray[Any]]:
    """Gaps and strengths of `experts` `[tokens, layers, n]` among `logits` `[tokens, layers, E]`."""
    experts = np.sort(experts, axis=-1)
    kept = np.take_along_axis(logits, experts, axis=-1).astype(np.float32)
    strengths = _as_strengths(kept.max(axis=-1, keepdims=True) - kept)
    return [np.diff(experts, axis=-1, prepend=0).astype(np.uint8), strengths]


def _coded_early(early: Halves, count: int) -> list[npt.NDArray[Any]]:
    """Gaps and strengths of the `count` best, then the mean of the others' exponentials, as a strength."""
    order = np.argpartition(-early, count - 1, axis=-1)
    best, others = order[..., :count], order[..., count:]
    below = early.max(axis=-1, keepdims=True) - np.take_along_axis(early, others, axis=-1).astype(np.float32)
    with np.errstate(divide="ignore"):  # nothing of it is left, or there are no others
        rest = -np.log(np.exp(-below).sum(axis=-1) / max(1, others.shape[-1]))
    return [*_coded(early, best), _as_strengths(rest)]


def _decoded_early(fields: _Fields, shape: tuple[int, int, int], num_experts: int) -> Halves | None:
    if not shape[2]:
        return None
    kept = fields.ranked(shape)
    rest = fields.take("u1", shape[:2])
    return kept.laid_out(num_experts, _as_logits(rest)[..., None])


def _as_strengths(below: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
    return np.clip(np.rint(STEPS * below), 0, 255).astype(np.uint8)


def _as_logits(strengths: npt.NDArray[np.uint8]) -> Halves:
    return (strengths / -STEPS).astype(np.float16)


def first_documents(trace: Trace, count: int) -> Trace:
    """The first `count` documents of `trace`."""
    end = int(trace.bounds[count])
    early = None if trace.early is None else trace.early[:end]
    return Trace(trace.logits[:end], trace.topk[:end], trace.tokens[:end], trace.bounds[: count + 1], early)


def trim(trace: Trace, info: TraceInfo, budget: int, *, keeps_early: bool = False) -> bytes:
    """As many of the first documents as compress into `budget` bytes.

    Raises ValueError when not even one does, and what `compress` raises.
    """
    count = len(trace.bounds) - 1
    for _ in range(_TRIES):
        content = compress(first_documents(trace, count), info, keeps_early=keeps_early)
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
    parser.add_argument("--early", action="store_true", help="keep what routers say one layer early")
    options = parser.parse_args(arguments)
    trace, info = read_compact(options.trace)
    if options.out.suffix == ".safetensors":
        write_trace(options.out, trace, info)
        return
    content = trim(trace, info, int(options.megabytes * 1e6), keeps_early=options.early)
    write_compact(options.out, content)
    kept, _ = decompress(content)
    print(
        f"{options.out.name}: {kept.num_tokens:,} of {trace.num_tokens:,} tokens, {len(kept.bounds) - 1} "
        f"documents, {len(content) / 1e6:.2f} MB, {len(content) / kept.num_tokens:.0f} bytes a token"
    )


if __name__ == "__main__":
    main()
