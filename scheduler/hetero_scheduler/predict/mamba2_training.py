"""From a trace to a trained predictor: documents split, one model a group of layers, their recall."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from hetero_scheduler.predict.mamba2_block import Mamba2Sizes
from hetero_scheduler.predict.mamba2_model import GroupModel, GroupShape
from hetero_scheduler.predict.recall import Recall, find_origins, measure_recall, recall_at
from hetero_scheduler.predict.routing import layer_groups
from hetero_scheduler.predict.training import TrainingOptions, TrainingProgress, train_group
from hetero_scheduler.predict.training_data import HELD_OUT, DocumentSplit, GroupData, split_documents
from hetero_scheduler.trace import Trace

MIN_CHOSEN_BY_LOGITS = 0.99
"""Share of choices that must be the highest logits; what is missing to 1 are ties in half precision."""
CHECKED_TOKENS = 4096

GroupProgress = Callable[[int, TrainingProgress], None]
"""Called after each epoch with the number of the group that trains."""


@dataclass(frozen=True)
class PredictorShape:
    """The parts that one can choose; layers, experts and top-k are the trace's."""

    num_groups: int = 2
    num_blocks: int = 2
    sizes: Mamba2Sizes = field(default_factory=lambda: Mamba2Sizes(d_model=96, state_size=32, head_dim=32))
    dropout: float = 0.05


class Trained(NamedTuple):
    """Models on the CPU, one a group in the order of layers, and which documents they have seen."""

    models: tuple[GroupModel, ...]
    split: DocumentSplit


def train_predictor(
    trace: Trace,
    shape: PredictorShape,
    *,
    options: TrainingOptions,
    held_out: float = HELD_OUT,
    device: str = "cpu",
    progress: GroupProgress | None = None,
) -> Trained:
    """Train one model after the other. `options.minutes` is for all of them together.

    `held_out`: share of the documents for validation, and again for the test. Raises ValueError for a trace
    with too few documents, none for the test of more than eight steps, or routers that do not choose by
    logits; all before training.
    """
    split = split_documents(len(trace.bounds) - 1, seed=options.seed, held_out=held_out)
    _check_choices(trace)
    find_origins(trace, split.test)
    groups = layer_groups(trace.num_layers, shape.num_groups)
    if options.minutes is not None:
        options = replace(options, minutes=options.minutes / len(groups))
    models = []
    for g, group in enumerate(groups):
        model = train_group(
            GroupShape(
                len(group), trace.num_experts, trace.top_k, shape.num_blocks, shape.sizes, shape.dropout
            ),
            GroupData(trace, group, device),
            split=split,
            options=options,
            progress=None if progress is None else lambda at, g=g: progress(g, at),  # type: ignore[misc]
        )
        models.append(model.cpu())
    return Trained(tuple(models), split)


def recall_of(trained: Trained, trace: Trace) -> list[Recall]:
    """Recall on the documents that training never looked at, beside the rivals that need no model."""
    return measure_recall(trained.models, trace, train=trained.split.train, test=trained.split.test)


def _check_choices(trace: Trace) -> None:
    """Raise ValueError when routers choose by more than their logits, such as a bias for balance.

    Serving observes logits alone, and would take other experts for activated than training did.
    """
    logits, chosen = trace.logits[:CHECKED_TOKENS], trace.topk[:CHECKED_TOKENS]
    share = recall_at(logits.astype(np.float32), chosen, trace.top_k)
    if share < MIN_CHOSEN_BY_LOGITS:
        raise ValueError(
            f"only {share:.1%} of the routers' choices are their highest logits: these routers choose by "
            "more than logits, which this predictor does not see"
        )
