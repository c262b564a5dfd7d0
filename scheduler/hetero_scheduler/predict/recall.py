"""How many of a step's experts were among those predicted, one to eight steps ahead, and by what else.

Recall@n: of the K experts that a router chooses, the share found among the n best scores. The rivals need no
model: *persistence* repeats the last step's experts, *static* ranks by how often an expert is used, and
*first-order* adds up, over the last step's experts, how often each other one followed so many steps later.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from hetero_scheduler.predict.mamba2_model import GroupModel, State
from hetero_scheduler.predict.refinement import Refinement
from hetero_scheduler.predict.training_data import GroupData
from hetero_scheduler.trace import Trace

Scores = npt.NDArray[np.float32]
HORIZON = 8
STRIDE = 8
"""Recursive prediction starts at every eighth step: neighbours would say much the same."""


@dataclass(frozen=True)
class Recall:
    """Shares from 0 to 1, means over origins and layers."""

    predictor: str
    distance: int
    """Steps from the last one seen to the one predicted."""
    at_k: float
    at_k3: float
    """Among the K + 3 best: what SeqMoE prefetches."""
    at_2k: float


class Origins(NamedTuple):
    """From where predictions are made: each has `horizon` steps after it in its document."""

    documents: npt.NDArray[np.int64]  # [N]
    offsets: npt.NDArray[np.int64]  # [N] last step seen, counted from the document's start
    tokens: npt.NDArray[np.int64]  # [N] the same step, counted from the trace's start


def find_origins(
    trace: Trace, documents: npt.NDArray[np.int64], *, horizon: int = HORIZON, stride: int = STRIDE
) -> Origins:
    """Every `stride`-th step of `documents` that has `horizon` steps after it, by offset, then document.

    Raises ValueError when no document is that long.
    """
    starts, lengths = trace.bounds[documents], np.diff(trace.bounds)[documents]
    found = [
        (int(documents[i]), offset, int(starts[i]) + offset)
        for offset in range(0, int(lengths.max()) - horizon, stride)
        for i in np.flatnonzero(lengths > offset + horizon)
    ]
    if not found:
        raise ValueError(f"no document is longer than {horizon} steps; its recall cannot be measured")
    return Origins(*np.array(found, dtype=np.int64).T)


def recall_at(scores: Scores, chosen: npt.NDArray[np.integer], count: int) -> float:
    """Share of `chosen` `[N, L, K]` among the `count` best of `scores` `[N, L, E]`."""
    count = min(count, scores.shape[-1])
    best = np.argpartition(-scores, count - 1, axis=-1)[..., :count]
    return float((chosen[..., :, None] == best[..., None, :]).any(axis=-1).mean())


class Statistics:
    """What the rivals know, counted over the training documents."""

    def __init__(self, trace: Trace, documents: npt.NDArray[np.int64]) -> None:
        self.trace, self.documents = trace, documents
        total = sum(self._document(document).sum(axis=0) for document in documents)
        self.frequency: Scores = total / np.float32(np.diff(trace.bounds)[documents].sum())  # [L, E]

    def scores(self, tokens: npt.NDArray[np.int64], distance: int) -> Iterator[tuple[str, Scores]]:
        """Name and scores `[N, L, E]` of each rival for the step `distance` after each of `tokens`."""
        last = _multi_hot(self.trace.topk[tokens], self.trace.num_experts)
        followed: Scores = np.einsum("nle,lef->nlf", last, self._followers(distance), optimize=True)
        yield "persistence", last + np.float32(1e-3) * self.frequency
        yield "static", np.broadcast_to(self.frequency, last.shape)
        yield "first-order", followed

    def _followers(self, distance: int) -> Scores:
        """P(expert f at a step | expert e `distance` steps before). `[L, E, E]`"""
        counts = np.zeros((self.trace.num_layers, self.trace.num_experts, self.trace.num_experts), np.float32)
        for document in self.documents:
            part = self._document(document).transpose(1, 2, 0)  # [L, E, steps]
            if part.shape[2] > distance:
                counts += part[..., :-distance] @ part[..., distance:].transpose(0, 2, 1)
        uses = counts.sum(axis=-1, keepdims=True) / self.trace.top_k
        shares: Scores = (counts / np.maximum(uses, 1)).astype(np.float32)
        return shares

    def _document(self, document: np.int64) -> Scores:
        """1 where an expert is chosen. `[steps, L, E]`"""
        first, last = self.trace.bounds[document : document + 2]
        return _multi_hot(self.trace.topk[first:last], self.trace.num_experts)


@torch.no_grad()
def model_scores(models: Sequence[GroupModel], trace: Trace, origins: Origins, horizon: int) -> Scores:
    """What trained models say from each origin, `[horizon, N, L, E]`: one step, then recursive ones.

    `models` cover the trace's layers from 0 upwards, as in `Mamba2Predictor`.
    """
    first, parts = 0, []
    for model in models:
        group = range(first, first + model.shape.num_layers)
        device = str(next(model.parameters()).device)
        logits, state = _at_origins(model.eval(), GroupData(trace, group, device), origins)
        parts.append(torch.cat([logits[None], model.rollout(logits, state, horizon - 1)]).cpu().numpy())
        first = group.stop
    return np.concatenate(parts, axis=2)


def measure_recall(
    models: Sequence[GroupModel],
    trace: Trace,
    *,
    train: npt.NDArray[np.int64],
    test: npt.NDArray[np.int64],
    horizon: int = HORIZON,
    stride: int = STRIDE,
) -> list[Recall]:
    """Recall of the models and of their rivals at every distance up to `horizon`, on the documents `test`.

    The rivals count over the documents `train`. All distances share the same origins, so that they compare.
    """
    origins = find_origins(trace, test, horizon=horizon, stride=stride)
    predicted = model_scores(models, trace, origins, horizon)
    statistics, found = Statistics(trace, train), []
    for distance in range(1, horizon + 1):
        truth, k = trace.topk[origins.tokens + distance], trace.top_k
        rivals = statistics.scores(origins.tokens, distance)
        for name, scores in [("mamba2", predicted[distance - 1]), *rivals]:
            shares = [recall_at(scores, truth, count) for count in (k, k + 3, 2 * k)]
            found.append(Recall(name, distance, *shares))
    return found


def refined_recall(
    refinement: Refinement,
    shares: npt.NDArray[np.float16],
    trace: Trace,
    *,
    test: npt.NDArray[np.int64],
    stride: int = STRIDE,
) -> list[Recall]:
    """Recall of the next step when more is known of it, from the origins of `measure_recall`.

    `shares`: what the refined predictor expects a step ahead, as `one_step_shares` gives them.
    """
    steps = find_origins(trace, test, stride=stride).tokens + 1
    expected = refinement.with_tokens(shares[steps].astype(np.float32), trace.tokens[steps])
    said = [("mamba2, token known", expected)]
    if refinement.pool is not None and trace.early is not None:
        early = trace.early[steps].astype(np.float32)
        near = refinement.with_next_router(expected, early, slice(0, trace.num_layers))
        said.append(("mamba2, next router asked", near))
    counts = (trace.top_k, trace.top_k + 3, 2 * trace.top_k)
    return [
        Recall(name, 1, *(recall_at(scores, trace.topk[steps], count) for count in counts))
        for name, scores in said
    ]


def _at_origins(model: GroupModel, data: GroupData, origins: Origins) -> tuple[torch.Tensor, State]:
    """Logits `[N, n, E]` and state after the model has seen each origin's document up to the origin."""
    documents = np.unique(origins.documents)
    bounds = data.bounds[np.stack([documents, documents + 1], axis=1)]
    batch = data.batch(np.stack([bounds[:, 0], bounds[:, 1] - bounds[:, 0]], axis=1))
    rows = torch.from_numpy(np.searchsorted(documents, origins.documents)).to(batch.states.device)
    state, kept = model.initial_state(len(documents)), []
    for offset in range(int(origins.offsets.max()) + 1):
        logits, state = model.step(batch.states[:, offset], state)
        here = rows[torch.from_numpy(np.flatnonzero(origins.offsets == offset)).to(rows.device)]
        if len(here):
            kept.append((logits[here], [tuple(part[here] for part in block) for block in state]))
    blocks = [
        type(block)(*(torch.cat(parts) for parts in zip(*(states[i] for _, states in kept), strict=True)))
        for i, block in enumerate(state)
    ]
    return torch.cat([logits for logits, _ in kept]), tuple(blocks)


def _multi_hot(chosen: npt.NDArray[np.integer], num_experts: int) -> Scores:
    """1 where an expert is chosen. `[T, L, K]` to `[T, L, E]`"""
    hot = np.zeros((*chosen.shape[:-1], num_experts), dtype=np.float32)
    np.put_along_axis(hot, chosen.astype(np.int64), np.float32(1), axis=-1)
    return hot
