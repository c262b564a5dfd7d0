"""Texts to listen to: documents of a split, all kinds in turn, cut to one length."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from bench.models.streams import Stream

Tokens = npt.NDArray[np.int64]
PAD = 1
"""The token that pads rows."""
LEFT_OUT = "chat"
"""The kind that is other documents recast: it would put one text into two splits."""


def choose_documents(
    streams: Sequence[Stream], count: int, *, length: int, shortest: int, is_held_out: bool, seed: int = 0
) -> list[Tokens]:
    """Up to `count` documents of `shortest` tokens or more, the first `length` tokens of each.

    The kinds come in turn as long as each has one, so that any beginning of the list is mixed. Raises
    ValueError when no document is long enough.
    """
    draw = np.random.default_rng(seed)
    by_kind: dict[str, list[Tokens]] = {}
    for stream in streams:
        if stream.is_held_out == is_held_out and stream.kind != LEFT_OUT:
            by_kind.setdefault(stream.kind, []).extend(_long_ones(stream, length, shortest))
    shuffled = [[kind[i] for i in draw.permutation(len(kind))] for _, kind in sorted(by_kind.items())]
    turns = itertools.zip_longest(*shuffled)
    chosen = [document for turn in turns for document in turn if document is not None][:count]
    if not chosen:
        raise ValueError(f"no document has {shortest} tokens")
    return chosen


def side_by_side(documents: Sequence[Tokens]) -> tuple[Tokens, npt.NDArray[np.bool_]]:
    """One row each, `[documents, most tokens]`, padded on the right, and which tokens are the documents'.

    Attention is causal, so what pads a shorter one changes nothing before it.
    """
    sizes = np.array([len(document) for document in documents])
    is_real = np.arange(sizes.max()) < sizes[:, None]
    rows = np.full(is_real.shape, PAD, dtype=np.int64)
    rows[is_real] = np.concatenate(documents)
    return rows, is_real


def _long_ones(stream: Stream, length: int, shortest: int) -> list[Tokens]:
    starts = stream.starts
    sizes = np.diff(np.append(starts, len(stream.tokens)))
    return [
        stream.tokens[start : start + min(size, length)].astype(np.int64)
        for start, size in zip(starts, sizes, strict=True)
        if size >= shortest
    ]
