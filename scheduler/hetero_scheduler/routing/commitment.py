"""How likely each drafted token is to be committed: the weights of block selection (PSR §7, appendix B)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


class CommitmentRates:
    """Position weights: the share of drafts of one text whose token at a depth was committed, so far.

    A function of the text and its drafts alone. Before a depth was ever drafted its rate is 1.
    """

    def __init__(self, k: int) -> None:
        """`k`: the most tokens of a draft."""
        self._drafted = np.zeros(k, np.int64)
        self._committed = np.zeros(k, np.int64)

    def observe(self, num_drafted: int, num_committed: int) -> None:
        """Of a draft of `num_drafted` tokens the first `num_committed` were accepted."""
        self._drafted[:num_drafted] += 1
        self._committed[:num_committed] += 1

    def weights(self, num_drafted: int) -> npt.NDArray[np.float64]:
        """Of the root and so many drafted tokens: the square roots of their rates. `[num_drafted + 1]`"""
        drafted, committed = self._drafted[:num_drafted], self._committed[:num_drafted]
        rates = np.concatenate([[1.0], (committed + 1) / (drafted + 1)])
        weights: npt.NDArray[np.float64] = np.sqrt(rates)
        return weights


def confidence_weights(confidences: Sequence[float]) -> npt.NDArray[np.float64]:
    """Of the root and of drafted tokens, each of which its drafter held for so likely: the square root of how
    likely all of them up to there are. `[len(confidences) + 1]`"""
    likely = np.cumprod([1.0, *confidences])
    weights: npt.NDArray[np.float64] = np.sqrt(likely)
    return weights
