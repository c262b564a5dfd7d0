"""What a calibration counts, whoever hears the routers: a pass of the model, or a recorded trace."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from hetero_scheduler.routing import Calibration, Shape, TokenPrior
from hetero_scheduler.routing.calibration import SHARE_UNIT


class Tally:
    """Counts what routers say: `begin` for each text, then `add` for each of its layers.

    `tokens` int64, ascending: those that get a prior.
    """

    def __init__(self, shape: Shape, tokens: npt.NDArray[np.int64]) -> None:
        num_layers, num_experts, _ = shape
        self._prior = TokenPrior(tokens, np.zeros((len(tokens) + 1, num_layers, num_experts), np.uint8))
        # the last row is of all tokens without a prior
        self._chosen = np.zeros((len(tokens) + 1, num_layers, num_experts), np.int32)
        self._occurrences = np.zeros(len(tokens) + 1, np.int64)
        self._range_sum = np.zeros(num_layers)
        self._rows = np.empty(0, np.int64)

    def begin(self, tokens: npt.NDArray[np.integer]) -> None:
        """What follows is of `tokens` `[T]`."""
        self._rows = self._prior.rows(tokens)
        np.add.at(self._occurrences, self._rows, 1)

    def add(self, layer: int, scores: npt.NDArray[np.floating], own: npt.NDArray[np.integer]) -> None:
        """`scores` `[T, E]`: what the router of `layer` takes its top-k of, -inf where it excludes an expert;
        `own` `[T, top_k]`: what it takes."""
        most = scores.max(axis=1)
        least = np.where(scores == -np.inf, np.inf, scores).min(axis=1)
        self._range_sum[layer] += float((most - least).astype(np.float64).sum())
        np.add.at(self._chosen[:, layer], (self._rows[:, None], own), 1)

    def calibration(self) -> Calibration:
        """Of everything so far."""
        occurrences = np.maximum(self._occurrences, 1)[:, None, None]
        share = np.minimum(self._chosen * SHARE_UNIT // occurrences, SHARE_UNIT - 1).astype(np.uint8)
        share[-1] = 0
        return Calibration(
            self._range_sum / self._occurrences.sum(),
            self._chosen.sum(axis=0).astype(np.float64),
            TokenPrior(self._prior.tokens, share),
        )

    def known_share(self) -> float:
        """Of tokens so far, those with a prior."""
        return 1.0 - float(self._occurrences[-1]) / float(self._occurrences.sum())


def frequent_tokens(texts: Iterable[npt.ArrayLike], count: int) -> npt.NDArray[np.int64]:
    """The `count` most frequent tokens, ties to the lowest, in ascending order."""
    tokens, uses = np.unique(np.concatenate([np.asarray(text) for text in texts]), return_counts=True)
    frequent: npt.NDArray[np.int64] = np.sort(tokens[np.argsort(-uses, kind="stable")[:count]])
    return frequent.astype(np.int64)
