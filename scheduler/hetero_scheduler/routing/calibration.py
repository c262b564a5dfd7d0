"""What held-out text says of a model's routers before a request begins (PSR §4.1, Appendix B)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from hetero_scheduler.routing.base import Shape

SHARE_UNIT = 256
"""A token prior counts in 256ths: exact in float32, so nobody rounds differently."""


@dataclass(frozen=True)
class TokenPrior:
    """How often a layer routes an input token to each expert.

    `tokens` int64 `[N]`, ascending. `share` uint8 `[N + 1, L, E]`, in 256ths; the last row, all zeros, is of
    every token that is not among them.
    """

    tokens: npt.NDArray[np.int64]
    share: npt.NDArray[np.uint8]

    def __post_init__(self) -> None:
        """Raise ValueError when the parts do not fit together."""
        if self.share.ndim != 3 or len(self.share) != len(self.tokens) + 1 or self.share[-1].any():
            raise ValueError(
                f"share {self.share.shape} needs a row for each of {len(self.tokens)} tokens and one of zeros"
            )
        if (np.diff(self.tokens) <= 0).any():
            raise ValueError("tokens do not ascend")

    def rows(self, tokens: npt.NDArray[np.integer]) -> npt.NDArray[np.int64]:
        """The row of `share` for each of `tokens`. `[T]`"""
        rows: npt.NDArray[np.int64] = self._row_of[np.minimum(tokens, len(self._row_of) - 1)]
        return rows

    def row(self, token: int) -> int:
        """The same of one token, by plain numbers: nothing waits for an array to be made."""
        return int(self._row_of[min(token, len(self._row_of) - 1)])

    @cached_property
    def _row_of(self) -> npt.NDArray[np.int64]:
        """By token; the last entry is of all that are higher."""
        length = int(self.tokens[-1]) + 2 if len(self.tokens) else 1
        row_of = np.full(length, len(self.tokens), np.int64)
        row_of[self.tokens] = np.arange(len(self.tokens))
        return row_of


@dataclass(frozen=True)
class Calibration:
    """`score_range` float64 `[L]`: mean of max - min of a layer's selection scores. `uses` float64 `[L, E]`:
    how often the router chose each expert."""

    score_range: npt.NDArray[np.float64]
    uses: npt.NDArray[np.float64]
    prior: TokenPrior

    def __post_init__(self) -> None:
        """Raise ValueError when the parts do not fit together."""
        if len(self.score_range) != len(self.uses) or self.prior.share.shape[1:] != self.uses.shape:
            raise ValueError(
                f"range {self.score_range.shape}, uses {self.uses.shape} and token prior "
                f"{self.prior.share.shape} are not of one model"
            )

    def warm_set(self, capacity: int) -> npt.NDArray[np.bool_]:
        """The `capacity` experts of each layer that were used most, ties to the lowest. `[L, E]`"""
        ranking = np.argsort(-self.uses, axis=1, kind="stable")[:, :capacity]
        is_warm = np.zeros(self.uses.shape, np.bool_)
        np.put_along_axis(is_warm, ranking, True, axis=1)
        return is_warm


def uncalibrated(shape: Shape) -> Calibration:
    """Nothing known: ranges of 1, the first experts warm, no token prior. For policies that need none."""
    num_layers, num_experts, _ = shape
    return Calibration(
        np.ones(num_layers),
        np.zeros((num_layers, num_experts)),
        TokenPrior(np.empty(0, np.int64), np.zeros((1, num_layers, num_experts), np.uint8)),
    )
