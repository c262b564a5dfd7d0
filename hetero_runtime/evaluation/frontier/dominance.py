"""Whether one frontier lies below another, wherever both are.

A frontier is the least number of copies within a divergence: the points that no other of its set beats in
both, joined by straight lines, since the bonus between two points can be chosen too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from hetero_runtime.evaluation.frontier.base import Point

Measure = Callable[[Point], float]
"""What of a point is to be little: its copies, or those that are demanded."""

Curve = tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]
"""Divergence, ascending, and the measure, descending."""


def frontier(points: Sequence[Point], measure: Measure) -> Curve:
    """The points of a frontier, by divergence."""
    ordered = sorted((point.kl, measure(point)) for point in points)
    kept: list[tuple[float, float]] = []
    for nats, value in ordered:
        if not kept or value < kept[-1][1]:
            kept.append((nats, value))
    return np.array([nats for nats, _ in kept]), np.array([value for _, value in kept])


def advantage(ours: Curve, theirs: Curve) -> tuple[float, float] | None:
    """The least and the mean of `theirs / ours` over the divergences that both reach, at the points of both;
    above 1, `ours` lies below. None where they share none."""
    low, high = max(ours[0][0], theirs[0][0]), min(ours[0][-1], theirs[0][-1])
    if low > high:
        return None
    at = np.unique(np.concatenate([ours[0], theirs[0], [low, high]]))
    at = at[(at >= low) & (at <= high)]
    ratio = np.interp(at, *theirs) / np.interp(at, *ours)
    return float(ratio.min()), float(ratio.mean())
