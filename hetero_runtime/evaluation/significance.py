"""Tests for paired differences (PSR §6.1), exact where that is feasible."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

LEVEL = 0.05
"""Below it, a difference is called significant."""
NUM_FLIPS = 100_000
"""Random sign patterns where all of them are too many."""
_MOST_ENUMERATED = 16
_Z95 = NormalDist().inv_cdf(0.975)


def half_width(standard_error: float) -> float:
    """Of the 95 % interval of a mean, by the normal distribution."""
    return _Z95 * standard_error


def mcnemar(only_first: int, only_second: int) -> float:
    """Two-sided p that as many or more of the discordant questions go one way, were each way as likely.

    `only_first`, `only_second`: questions that one alone solves. Exact (binomial); McNemar 1947.
    """
    discordant, fewer = only_first + only_second, min(only_first, only_second)
    ways, tail = 1, 0
    for k in range(fewer + 1):
        tail += ways
        ways = ways * (discordant - k) // (k + 1)
    return min(1.0, float(2 * tail / 2**discordant))


def sign_flip(differences: npt.ArrayLike) -> float:
    """Two-sided p that the sum of `differences` `[units]` is as far from 0 or farther, were each as likely
    with the other sign.

    All sign patterns of up to 16 units that differ, else 100,000 drawn with a fixed seed.
    """
    values = np.asarray(differences, dtype=np.float64)
    values = values[values != 0]
    observed = abs(values.sum()) * (1 - 1e-12)  # sums in another order may round below it
    if len(values) <= _MOST_ENUMERATED:
        patterns = np.arange(2 ** len(values))[:, None] >> np.arange(len(values)) & 1
        return float(np.mean(np.abs((1 - 2 * patterns) @ values) >= observed))
    random, as_far = np.random.default_rng(0), 0
    for _ in range(100):
        signs = random.integers(0, 2, (NUM_FLIPS // 100, len(values)), dtype=np.int8) * 2 - 1
        as_far += int(np.count_nonzero(np.abs(signs @ values) >= observed))
    return (1 + as_far) / (1 + NUM_FLIPS)


def holm(p_values: Sequence[float]) -> list[float]:
    """`p_values` corrected over the family that they are (Holm 1979): compare each with the level itself."""
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    corrected, largest = [0.0] * len(p_values), 0.0
    for rank, i in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[i]))
        corrected[i] = largest
    return corrected
