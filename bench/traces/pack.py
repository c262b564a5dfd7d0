"""Choose so much of the tokenised corpus that it fits beside the tree on its way to a GPU machine.

    python -m bench.traces.pack --corpus DIR --cache DIR --out DIR --megabytes 16 [--kinds story dialog math]

A packed folder is a smaller cache folder (`bench/models/streams.py`): `load_streams` reads it and needs no
corpus. Held-out streams go whole; training streams give documents evenly spaced over each source, so many
that sources keep the shares in which they are drawn, until their compressed size is used up:

    kept tokens of a source = min(all, scale × share)      sum of kept × bytes a token = budget
"""

from __future__ import annotations

import argparse
import lzma
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from bench.models.mixture import KIND_WEIGHTS, source_shares
from bench.models.model import Geometry
from bench.models.streams import TOKENIZER, Stream, load_streams, write_stream

_PROBE_TOKENS = 200_000
_SLACK = 0.97
"""Of the budget: a source packs a little worse in pieces than in the piece that was measured."""


def choose_tokens(
    sizes: Sequence[int], shares: Sequence[float], costs: Sequence[float], budget: float
) -> list[int]:
    """Tokens to keep of each source: in proportion to `shares` as far as a source reaches.

    `sizes`: tokens there are. `costs`: compressed bytes a token. `budget`: bytes for all of them.
    """
    low, high = 0.0, max(size / share for size, share in zip(sizes, shares, strict=True))
    kept = list(sizes)
    if np.dot(sizes, costs) <= budget:
        return kept
    for _ in range(60):
        scale = (low + high) / 2
        kept = [min(size, int(scale * share)) for size, share in zip(sizes, shares, strict=True)]
        low, high = (scale, high) if np.dot(kept, costs) <= budget else (low, scale)
    return [min(size, int(low * share)) for size, share in zip(sizes, shares, strict=True)]


def thin(stream: Stream, num_tokens: int) -> Stream:
    """About `num_tokens` tokens of `stream`: whole documents, evenly spaced; at least one document."""
    share = min(1.0, num_tokens / len(stream.tokens))
    starts = stream.starts
    ends = np.append(starts[1:], len(stream.tokens))
    rank = np.floor(share * np.arange(1, len(starts) + 1))
    is_kept = np.diff(rank, prepend=0.0) > 0
    is_kept[0] |= not is_kept.any()
    documents = zip(starts[is_kept], ends[is_kept], strict=True)
    return replace(stream, tokens=np.concatenate([stream.tokens[start:end] for start, end in documents]))


def pack(streams: Sequence[Stream], budget: int, *, kinds: Sequence[str] | None = None) -> list[Stream]:
    """The streams that travel: all that is held out, and as much of the others as `budget` bytes hold.

    `kinds`: of text; all unless given. Raises ValueError when the held-out streams alone exceed the budget.
    """
    if kinds is not None:
        streams = [stream for stream in streams if stream.kind in kinds]
    held = [stream for stream in streams if stream.is_held_out]
    training = [stream for stream in streams if not stream.is_held_out]
    left = _SLACK * budget - sum(_cost(stream) * len(stream.tokens) for stream in held)
    if left <= 0:
        raise ValueError(f"held-out streams alone take more than {budget / 1e6:.1f} MB")
    kept = choose_tokens(
        [len(stream.tokens) for stream in training],
        source_shares(training),
        [_cost(stream) for stream in training],
        left,
    )
    return held + [thin(stream, count) for stream, count in zip(training, kept, strict=True) if count]


def _cost(stream: Stream) -> float:
    """Compressed bytes a token, measured on the beginning of the stream."""
    probe = stream.tokens[:_PROBE_TOKENS]
    return len(lzma.compress(probe.astype("<u2").tobytes(), preset=6)) / len(probe)


def write_folder(streams: Sequence[Stream], tokenizer: Path, folder: Path) -> int:
    """Write a cache folder anew; returns its bytes."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for stream in streams:
        write_stream(folder, stream, preset=6)
    shutil.copy(tokenizer, folder / TOKENIZER)
    return sum(path.stat().st_size for path in folder.iterdir())


def main(arguments: Sequence[str] | None = None) -> None:
    """Pack, and say what was kept."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--corpus", type=Path, required=True, help="folder of P.KIND.SOURCE.txt.xz")
    parser.add_argument("--cache", type=Path, required=True, help="tokenised sources, made where missing")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--megabytes", type=float, default=16.0)
    parser.add_argument("--kinds", nargs="+", choices=sorted(KIND_WEIGHTS), help="of text; all unless given")
    options = parser.parse_args(arguments)
    _, streams = load_streams(options.corpus, options.cache, Geometry().vocab_size)
    budget = int(options.megabytes * 1e6)
    kept = pack(streams, budget, kinds=options.kinds)
    num_bytes = write_folder(kept, options.cache / TOKENIZER, options.out)
    for is_held_out in (False, True):
        tokens, of = (
            sum(len(s.tokens) for s in part if s.is_held_out == is_held_out) for part in (kept, streams)
        )
        print(f"{'held out' if is_held_out else 'training'}: {tokens / 1e6:.2f} M of {of / 1e6:.2f} M tokens")
    print(f"{num_bytes / 1e6:.2f} MB in {options.out}")
    if num_bytes > 1.05 * budget:
        raise SystemExit(f"that is more than the {options.megabytes} MB asked for; ask for less")


if __name__ == "__main__":
    main()
