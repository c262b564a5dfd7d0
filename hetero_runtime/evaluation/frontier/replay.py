"""Copies of routing policies on a recorded trace, by the policies' code alone: no model, no weights.

A trace holds what each router said of a token and not what it would have said one layer early, so the
layer's own scores stand in for that guess: a pre-gate that is never wrong. For policies that look ahead the
copies are those of this bound. Text is as recorded: what a policy would have changed in it is not seen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from hetero_runtime.calibration.tally import Tally, frequent_tokens
from hetero_runtime.errors import ConfigError
from hetero_runtime.evaluation.frontier.base import Contender, Point, capacity_of
from hetero_scheduler.routing import Calibration, LogicalCache, Shape
from hetero_scheduler.trace import Trace

_NUM_PRIORS = 4096
_LEAST_AGREEMENT = 0.99
"""Of the recorded choices with the top-k of the recorded logits; float16 makes a few of them differ."""


class Halves(NamedTuple):
    """A trace, divided at a document's end: policies are calibrated on one part and run on the other."""

    calibration: Calibration
    replayed: Trace


def divide(trace: Trace, share: float) -> Halves:
    """The documents that make up `share` of the tokens, or a little more, calibrate.

    Raises ConfigError where a part would be empty, and for a trace whose routers chose by other than their
    logits (expert groups, correction biases): policies need what was compared.
    """
    _check_choice(trace)
    at = int(np.searchsorted(trace.bounds, share * trace.num_tokens))
    if not 0 < at < len(trace.bounds) - 1:
        raise ConfigError(
            f"a share of {share:g} of {len(trace.bounds) - 1} documents leaves nothing to calibrate on, or "
            "nothing to replay; give another share, or record more documents"
        )
    first, second = (_part(trace, begin, end) for begin, end in ((0, at), (at, len(trace.bounds) - 1)))
    return Halves(calibrate(first), second)


def replay(
    halves: Halves,
    contenders: Sequence[Contender],
    residencies: Sequence[float],
    *,
    done: Callable[[int, int], None] | None = None,
) -> list[Point]:
    """Points without divergence, residency by residency. `done(points, points in all)`.

    Raises ConfigError for a residency that no layer can run with.
    """
    trace = halves.replayed
    shape = Shape(trace.num_layers, trace.num_experts, trace.top_k)
    capacities = [capacity_of(residency, shape) for residency in residencies]
    points: list[Point] = []
    for residency, capacity in zip(residencies, capacities, strict=True):
        for contender in contenders:
            cache = LogicalCache(contender.policy, shape, capacity=capacity, calibration=halves.calibration)
            points.append(_point(trace, cache, contender, residency))
            if done is not None:
                done(len(points), len(contenders) * len(residencies))
    return points


def _point(trace: Trace, cache: LogicalCache, contender: Contender, residency: float) -> Point:
    inserted = demanded = deviating = 0
    for begin, end in pairwise(trace.bounds.tolist()):
        scores = np.ascontiguousarray(trace.logits[begin:end], dtype=np.float32)
        own = np.ascontiguousarray(trace.topk[begin:end], dtype=np.int64)
        cache.reset()
        decided = cache.select(scores, own, trace.tokens[begin:end], first_layer=0, guesses=scores)
        inserted += int(decided.inserted.sum())
        demanded += int(decided.demanded.sum())
        deviating += int(decided.deviating.sum())
    return Point(
        contender=contender,
        residency=residency,
        capacity=cache.capacity,
        divergence=None,
        perplexity=None,
        inserted=inserted / trace.num_tokens,
        demanded=demanded / trace.num_tokens,
        deviating=deviating / trace.topk.size,
    )


def _check_choice(trace: Trace) -> None:
    best = np.argsort(-trace.logits.astype(np.float32), axis=-1, kind="stable")[..., : trace.top_k]
    agreement = (best[..., :, None] == trace.topk[..., None, :]).any(axis=-1).mean()
    if agreement < _LEAST_AGREEMENT:
        raise ConfigError(
            f"only {agreement:.1%} of this trace's experts are the best of their router's logits: its model "
            "chooses by groups or biases, which a trace does not hold; evaluate the model itself with "
            "`hetero-runtime eval frontier`"
        )


def _part(trace: Trace, begin: int, end: int) -> Trace:
    """Documents `begin` to `end`."""
    bounds = trace.bounds[begin : end + 1]
    rows = slice(int(bounds[0]), int(bounds[-1]))
    return Trace(trace.logits[rows], trace.topk[rows], trace.tokens[rows], bounds - bounds[0])


def calibrate(trace: Trace) -> Calibration:
    """What policies must know of the model that `trace` is of, from its text; `logits` are what its routers
    compare."""
    shape = Shape(trace.num_layers, trace.num_experts, trace.top_k)
    tally = Tally(shape, frequent_tokens([trace.tokens], _NUM_PRIORS))
    tally.begin(trace.tokens)
    for layer in range(trace.num_layers):
        tally.add(layer, trace.logits[:, layer].astype(np.float32), trace.topk[:, layer])
    return tally.calibration()
