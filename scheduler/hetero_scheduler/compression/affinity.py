"""VisMMOE's Algorithm 1: besides the salient core, tokens that need few experts which the core does not."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from hetero_scheduler.compression.base import Floats, ImageTokens, Integers, TokenSelector, normalized


class ByAffinity(TokenSelector):
    """Score p = s - λΔ (Eq. 4): s the saliency normalised to [0, 1] within the image, Δ the share of a
    token's experts that no core token activates (Eq. 2).

    An expert is one of a layer, for that is what memory holds: the same number in two layers is two experts.
    The cores of all images of a prompt make up one expert set, since the prompt runs as one pass.
    """

    def __init__(self, keep_ratio: float, salient_ratio: float, *, weight: float) -> None:
        """`weight`: λ, at least 0."""
        super().__init__(keep_ratio, salient_ratio)
        if weight < 0:
            raise ValueError(f"affinity {weight} must not be negative")
        self._weight = weight

    def scores(self, images: Sequence[ImageTokens], cores: Sequence[Integers]) -> list[Floats]:
        target = _activated(images, cores)
        return [
            normalized(image.saliency) - self._weight * _marginal_expansion(image.experts, target)
            for image in images
        ]


def _activated(images: Sequence[ImageTokens], cores: Sequence[Integers]) -> npt.NDArray[np.bool_]:
    """Experts that some core token activates, `[P, E]`."""
    num_layers = images[0].experts.shape[0] if images else 0
    num_experts = 1 + max((int(image.experts.max(initial=0)) for image in images), default=0)
    target = np.zeros((num_layers, num_experts), dtype=np.bool_)
    for image, core in zip(images, cores, strict=True):
        for layer in range(num_layers):
            target[layer, image.experts[layer, core]] = True
    return target


def _marginal_expansion(experts: Integers, target: npt.NDArray[np.bool_]) -> Floats:
    """Δ of each token, `[N]`. A token's k experts of a layer are distinct, so each counts once in Eq. 2."""
    is_new = ~target[np.arange(len(target))[:, None, None], experts]  # [P, N, k]
    expansion: Floats = is_new.mean(axis=(0, 2))
    return expansion
