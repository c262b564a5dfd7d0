"""What all evaluations speak of: rows of tokens, and what a model says of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hetero_runtime.errors import RequestError

TokenIds = tuple[int, ...]
"""One row: a text from its first token on. Its first token is given, all others are predicted."""

TokensSeen = Callable[[int, int], None]
"""Called with (tokens done, tokens in all) while rows go through a model."""


class RowScore(NamedTuple):
    """What a model says of the tokens 1 to n-1 of a row of n."""

    nats: npt.NDArray[np.float64]
    """`[n - 1]` negative log-likelihood of each, given the tokens before it."""
    is_greedy: npt.NDArray[np.bool_]
    """`[n - 1]` whether it is what greedy decoding would have said (lowest id on ties)."""


class Estimate(NamedTuple):
    """A mean a token (or a question), with its uncertainty."""

    mean: float
    standard_error: float
    """0 where there is one unit alone, which says nothing of its own spread."""


def clustered_mean(sums: npt.ArrayLike, sizes: npt.ArrayLike) -> Estimate:
    """The mean of values that come in units, such as the tokens of a window: units are independent, what is
    inside one is not.

    `sums` `[units]`: of the values in each unit; `sizes` `[units]`: how many. The standard error is the
    cluster-robust one (sandwich, units/(units - 1)). Raises RequestError where there is no value.
    """
    total, size = np.asarray(sums, dtype=np.float64), np.asarray(sizes, dtype=np.float64)
    if not size.sum() > 0:
        raise RequestError("there is nothing to average: no token or question was scored")
    mean, units = total.sum() / size.sum(), len(size)
    if units < 2:
        return Estimate(float(mean), 0.0)
    residuals = total - mean * size
    spread = np.sqrt(units / (units - 1) * (residuals**2).sum()) / size.sum()
    return Estimate(float(mean), float(spread))
