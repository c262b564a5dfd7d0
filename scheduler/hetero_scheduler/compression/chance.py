"""Chance: what any method has to beat. With a salient core it is the mixture of both.

VisMMOE's Table 3 has `Mix` without a definition. Here it is Algorithm 1 without the marginal expansion: the
same core, and the rest of the budget spent at random.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hetero_scheduler.compression.base import Floats, ImageTokens, Integers, TokenSelector


class ByChance(TokenSelector):
    """Scores are random: of the seed, the image's place in the prompt and its number of tokens alone."""

    def __init__(self, keep_ratio: float, salient_ratio: float, *, seed: int) -> None:
        super().__init__(keep_ratio, salient_ratio)
        self._seed = seed

    def scores(self, images: Sequence[ImageTokens], cores: Sequence[Integers]) -> list[Floats]:
        return [
            np.random.default_rng((self._seed, place)).random(len(image.saliency))
            for place, image in enumerate(images)
        ]
