"""Algorithm 1 of VisMMOE with sets and loops, line by line, for all images of a prompt."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

from hetero_scheduler.compression import ImageTokens


def compress(
    images: Sequence[ImageTokens], *, salient: Fraction, keep: Fraction, weight: float
) -> list[list[int]]:
    """Kept tokens of each image. Ratios are exact, so their products are too."""
    saliency = [_to_unit(image.saliency.tolist()) for image in images]
    cores = [_top(dict(enumerate(s)), math.floor(salient * len(s))) for s in saliency]
    target = {e for image, core in zip(images, cores, strict=True) for i in core for e in _active(image, i)}
    kept = []
    for image, s, core in zip(images, saliency, cores, strict=True):
        scores = {}
        for i in set(range(len(s))) - core:
            active = _active(image, i)
            scores[i] = s[i] - weight * (len(active - target) / len(active))
        num_kept = max(math.floor(keep * len(s)), 1)
        kept.append(sorted(core | _top(scores, num_kept - len(core))))
    return kept


def _active(image: ImageTokens, token: int) -> set[tuple[int, int]]:
    """(layer, expert) pairs."""
    return {(layer, int(e)) for layer, chosen in enumerate(image.experts) for e in chosen[token]}


def _top(scores: dict[int, float], number: int) -> set[int]:
    return set(sorted(scores, key=lambda i: (-scores[i], i))[:number])


def _to_unit(values: list[float]) -> list[float]:
    least, most = min(values), max(values)
    return [(value - least) / (most - least) if most > least else 0.0 for value in values]
