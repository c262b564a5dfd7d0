"""The contract of a selector, and what all of them do alike.

    N tokens of an image ──► floor(αN) most salient: the core ──► best scores outside it ──► floor(βN) kept

For each image alone; only the experts of the cores are of the whole prompt.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

_ROUNDING = 1e-9
"""0.29 · 100 is 28.999999999999996 in floating point, and means 29."""


class ImageTokens(NamedTuple):
    """The N visual tokens of one image, in the order of the prompt."""

    saliency: Floats
    """`[N]`, finite: the attention that a token receives in the encoder, in any unit."""
    experts: Integers
    """`[P, N, k]`: what a token's router chose in each of the P layers of the pinned prefix."""


class TokenSelector(ABC):
    """Chooses tokens of all images of a prompt at once. The same arguments give the same choice."""

    def __init__(self, keep_ratio: float, salient_ratio: float) -> None:
        """Raises ValueError unless 0 <= `salient_ratio` <= `keep_ratio` <= 1."""
        if not 0 <= salient_ratio <= keep_ratio <= 1:
            raise ValueError(
                f"salient ratio {salient_ratio} and keep ratio {keep_ratio} must be 0 to 1, the first not "
                "above the second"
            )
        self._keep_ratio, self._salient_ratio = keep_ratio, salient_ratio

    def select(self, images: Sequence[ImageTokens]) -> list[Integers]:
        """For each image the tokens to keep, ascending: floor(βN) of N, but of no image nothing.

        Ties go to the lowest token.
        """
        cores = [self._core(image.saliency) for image in images]
        kept = []
        for image, core, scores in zip(images, cores, self.scores(images, cores), strict=True):
            rest = np.setdiff1d(np.arange(len(image.saliency)), core)
            num_rest = _num_kept(self._keep_ratio, len(image.saliency)) - len(core)
            kept.append(np.sort(np.concatenate([core, rest[top(scores[rest], num_rest)]])))
        return kept

    @abstractmethod
    def scores(self, images: Sequence[ImageTokens], cores: Sequence[Integers]) -> list[Floats]:
        """For each image `[N]`: the greater, the rather kept. Of tokens in the core nothing is asked."""

    def _core(self, saliency: Floats) -> Integers:
        """Eq. 1, ascending."""
        num_core = int(self._salient_ratio * len(saliency) + _ROUNDING)
        return np.sort(top(saliency, num_core))


def top(scores: Floats, number: int) -> Integers:
    """Positions of the `number` greatest, the greatest first, ties by lowest position."""
    return np.argsort(-scores, kind="stable")[:number]


def normalized(saliency: Floats) -> Floats:
    """Onto [0, 1]; all 0 where all are equal."""
    least = saliency.min(initial=np.inf)
    extent = saliency.max(initial=-np.inf) - least
    return (saliency - least) / extent if extent > 0 else np.zeros_like(saliency)


def _num_kept(keep_ratio: float, num_tokens: int) -> int:
    return max(int(keep_ratio * num_tokens + _ROUNDING), min(num_tokens, 1))
