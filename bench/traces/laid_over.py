"""A trace of few layers, laid over the routers of a deeper model, early ones included.

    layer of the model      0  1  2 ... 7  8  9 ...
    says what layer         0  1  2 ... 7  2  3 ...      of the trace says of the same token

So every layer keeps what a cache policy lives on: its own order in time, its load, what a token says about
its experts, and how well it is guessed one layer early. The trace's first layers do not return: layer 0 was
never asked early, and layer 1 is guessed from little more than the token, as no layer in a model's depth is.
A model that takes more experts than the trace's takes the next best of the same logits.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from hetero_scheduler.trace import Trace

_FIRST_AGAIN = 2
"""The first layer of the trace that says something again."""
EDGE = 0.01
"""A sigmoid router's least score, and its greatest below 1: logits stay finite."""


def laid_over(trace: Trace, *, layers: int, top_k: int) -> Trace:
    """`trace` as a model of `layers` layers says it that takes `top_k` experts of them.

    Raises ValueError where the trace does not hold what routers say early, and for one layer under several.
    """
    if trace.early is None:
        raise ValueError("the trace does not hold what routers say when they are asked early: record it so")
    if trace.num_layers == 1 < layers:
        raise ValueError(f"a trace of one layer, whose router was never asked early, for {layers} layers")
    of = np.arange(layers)
    first = min(_FIRST_AGAIN, trace.num_layers - 1)
    is_again = of >= trace.num_layers
    of[is_again] = first + (of[is_again] - trace.num_layers) % (trace.num_layers - first)
    logits = trace.logits[:, of]
    return replace(trace, logits=logits, early=trace.early[:, of], topk=_best(logits, top_k))


def whole_documents(trace: Trace, length: int) -> Trace:
    """The first `length` tokens of every document that has so many. Raises ValueError where none has."""
    starts = trace.bounds[:-1][np.diff(trace.bounds) >= length]
    if not len(starts):
        raise ValueError(f"no document of the trace has {length} tokens")
    rows = (starts[:, None] + np.arange(length)).reshape(-1)
    bounds = length * np.arange(len(starts) + 1, dtype=np.int64)
    early = None if trace.early is None else trace.early[rows]
    return Trace(trace.logits[rows], trace.topk[rows], trace.tokens[rows], bounds, early)


def for_sigmoid(trace: Trace) -> Trace:
    """`trace` of softmax routers, for those that compare sigmoid scores.

    Scores lie between 0 and 1 as the recorded logits lay between a layer's least and greatest, so experts are
    as far apart, measured in that range, as they were.
    """
    early = None if trace.early is None else _inverse_sigmoid(_stretched(trace.early))
    return replace(trace, logits=_inverse_sigmoid(_stretched(trace.logits)), early=early)


def sigmoid_scores(trace: Trace) -> Trace:
    """`trace` with what sigmoid routers compare in place of their logits."""
    scores = 1 / (1 + np.exp(-trace.logits.astype(np.float32)))
    return replace(trace, logits=scores.astype(np.float16), early=None)


def _best(logits: npt.NDArray[np.float16], top_k: int) -> npt.NDArray[np.int16]:
    order = np.argsort(-logits.astype(np.float32), axis=-1, kind="stable")
    return order[..., :top_k].astype(np.int16)


def _stretched(logits: npt.NDArray[np.float16]) -> npt.NDArray[np.float32]:
    wide = logits.astype(np.float32)
    least, most = wide.min(axis=-1, keepdims=True), wide.max(axis=-1, keepdims=True)
    share: npt.NDArray[np.float32] = EDGE + (1 - 2 * EDGE) * (wide - least) / np.maximum(most - least, 1e-6)
    return share


def _inverse_sigmoid(score: npt.NDArray[np.float32]) -> npt.NDArray[np.float16]:
    logits: npt.NDArray[np.float16] = np.log(score / (1 - score)).astype(np.float16)
    return logits
