"""Hot recall: of what a layer turns out to need, the part that was among the best guesses (VisMMOE §4.3.2).

The paper takes 10, 20 and 30 of 128 experts; other models the same shares of theirs, rounded up. Of a single
token it is the part of its top-k; of a prompt each expert counts by the tokens that chose it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from hetero_scheduler.predict.lookahead_features import (
    LookaheadShape,
    Passes,
    Shares,
    seen_at_layers,
    shares_ahead,
)
from hetero_scheduler.predict.lookahead_model import LookaheadWeights

PAPER_COUNTS, PAPER_EXPERTS = (10, 20, 30), 128
_BATCH = 256
ENOUGH = 0.95
"""Of the recall that most layers reach: from there on a layer's routing says enough."""


@dataclass(frozen=True)
class HotRecall:
    """Shares from 0 to 1: means over passes and over the layers at that distance."""

    predictor: str
    distance: int
    """Layers from the one that has routed to the one predicted; 0: mean over all distances."""
    at: tuple[float, float, float]
    """Among 10, 20 and 30 of 128 experts, or the same shares."""


def counts_of(num_experts: int) -> tuple[int, int, int]:
    """How many experts 10, 20 and 30 of 128 are."""
    ten, twenty, thirty = (math.ceil(num_experts * count / PAPER_EXPERTS) for count in PAPER_COUNTS)
    return ten, twenty, thirty


@torch.no_grad()
def predicted(weights: LookaheadWeights, shape: LookaheadShape, passes: Passes) -> Shares:
    """Scores of every layer and distance. `[N, S, W, E]`"""
    found = []
    for start in range(0, len(passes), _BATCH):
        part = passes.take(np.arange(start, min(start + _BATCH, len(passes))))
        hidden = part.hidden[:, :-1].astype(np.float32)
        features = torch.from_numpy(np.concatenate([seen_at_layers(part, shape.window), hidden], axis=-1))
        visual = torch.from_numpy(part.visual[part.document].astype(np.float32))
        y = weights.all_scores(features, visual)
        found.append(y.reshape(*y.shape[:2], shape.window, shape.num_experts).numpy())
    return np.concatenate(found)


def rivals(passes: Passes, train: Passes, window: int) -> Iterator[tuple[str, Shares]]:
    """Name and scores `[N, S, W, E]` of what needs no training: how often an expert is used in `train`, and
    what the passes before have used."""
    often = train.share.astype(np.float32).mean(axis=0)
    ahead = shares_ahead(_filled(passes, often[None]), window)
    yield "frequency", np.broadcast_to(ahead, (len(passes), *ahead.shape[1:]))
    yield "history", shares_ahead(_filled(passes, passes.history.astype(np.float32)), window)


def hot_recall(
    predictor: str, scores: Shares, truth: Shares, counts: tuple[int, int, int]
) -> list[HotRecall]:
    """Recall by distance, and first the mean over distances; those that no layer of the model has are left
    out. `scores`, `truth`: `[N, S, W, E]`; `truth` is NaN beyond the last layer."""
    by_layer = np.stack([_recalls(scores, truth, count) for count in counts])  # [3, S, W]
    found = [HotRecall(predictor, 0, _three(by_layer))]
    distances = range(min(truth.shape[1], truth.shape[2]))
    return found + [HotRecall(predictor, d + 1, _three(by_layer[:, :, d])) for d in distances]


def by_chance(num_experts: int, counts: tuple[int, int, int]) -> HotRecall:
    """What guesses find."""
    ten, twenty, thirty = (count / num_experts for count in counts)
    return HotRecall("random", 0, (ten, twenty, thirty))


def semantic_depth(scores: Shares, truth: Shares, count: int) -> int:
    """The fewest first layers whose routing informs predictions as well as most layers' does (L_semantic of
    Eq. 10): recall among the `count` best at ENOUGH of the median layer's. At least 1."""
    by_layer = np.nanmean(_recalls(scores, truth, count), axis=1)  # [S]
    enough = np.flatnonzero(by_layer >= ENOUGH * np.median(by_layer))
    return int(enough[0]) + 1


def _recalls(scores: Shares, truth: Shares, count: int) -> npt.NDArray[np.float64]:
    """Mean over passes, NaN beyond the last layer. `[S, W]`"""
    best = np.argpartition(-scores, count - 1, axis=-1)[..., :count]
    caught = np.take_along_axis(truth, best, axis=-1).sum(axis=-1, dtype=np.float64)
    recalls: npt.NDArray[np.float64] = (caught / truth.sum(axis=-1, dtype=np.float64)).mean(axis=0)
    return recalls


def _three(by_layer: npt.NDArray[np.float64]) -> tuple[float, float, float]:
    ten, twenty, thirty = (float(np.nanmean(part)) for part in by_layer)
    return ten, twenty, thirty


def _filled(passes: Passes, shares: Shares) -> Passes:
    """`passes` whose layers used `shares` `[N or 1, L, E]`."""
    count = len(shares)
    return Passes(
        shares.astype(np.float16),
        shares.astype(np.float16),
        passes.hidden[:count],
        passes.visual,
        passes.document[:count],
        passes.num_tokens[:count],
    )
