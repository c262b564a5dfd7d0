"""Saliency alone, as VisionZip chooses its dominant tokens; what is not kept is not merged into others."""

from __future__ import annotations

from collections.abc import Sequence

from hetero_scheduler.compression.base import Floats, ImageTokens, Integers, TokenSelector


class BySaliency(TokenSelector):
    """Score = saliency."""

    def scores(self, images: Sequence[ImageTokens], cores: Sequence[Integers]) -> list[Floats]:
        return [image.saliency for image in images]
