"""Gathered passes in, a lookahead predictor's file and its recall out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hetero_runtime.errors import RequestError
from hetero_runtime.lookahead.file import write_lookahead
from hetero_runtime.prediction.fingerprint import RouterFingerprint
from hetero_scheduler.predict.lookahead_features import LookaheadShape, Passes, shares_ahead
from hetero_scheduler.predict.lookahead_model import LookaheadWeights
from hetero_scheduler.predict.lookahead_recall import (
    HotRecall,
    by_chance,
    counts_of,
    hot_recall,
    predicted,
    rivals,
    semantic_depth,
)
from hetero_scheduler.predict.lookahead_training import LookaheadOptions, LookaheadProgress, train_lookahead
from hetero_scheduler.predict.training_data import DocumentSplit, split_documents
from hetero_scheduler.trace import load_entropies

Progress = Callable[[str, LookaheadProgress], None]
"""Told after each epoch: of which predictor, and how far."""


@dataclass(frozen=True)
class LookaheadReport:
    """What was trained, on what, and how well it predicts documents that it has not seen."""

    out: Path
    file_bytes: int
    num_parameters: int
    num_passes: int
    num_prompts: int
    num_documents: dict[str, int]
    """By use: train, validation, test."""
    has_images: bool
    load_entropy: float
    """Of the passes' experts; below about 0.95 high recall says little."""
    counts: tuple[int, int, int]
    """Experts among which recall is taken: 10, 20 and 30 of 128, or the same shares."""
    most: tuple[float, float, float]
    """Recall of a token that no predictor can exceed: counts / top_k, where that is below 1."""
    semantic_depth: int
    tokens: tuple[HotRecall, ...]
    """Of single tokens."""
    prompts: tuple[HotRecall, ...]


class _Trained(NamedTuple):
    name: str
    shape: LookaheadShape
    weights: LookaheadWeights


def train_from_passes(
    passes: Passes,
    out: Path,
    *,
    top_k: int,
    fingerprint: RouterFingerprint,
    options: LookaheadOptions,
    compares_visual: bool = False,
    progress: Progress | None = None,
) -> LookaheadReport:
    """Train, measure on the test documents, write `out`; the file's notes hold the report.

    `compares_visual`: also train one without the visual feature, only to be measured. Raises RequestError for
    passes with too little to learn from.
    """
    try:
        split = split_documents(len(passes.visual), seed=options.seed)
        lessons = [("lookahead", passes)]
        if compares_visual and passes.visual.shape[1]:
            lessons.append(("without the visual feature", passes.without_visual()))
        trained = [
            _train(name, each, top_k, split=split, options=options, progress=progress)
            for name, each in lessons
        ]
    except ValueError as error:
        raise RequestError(f"{error}; give more texts") from error
    found = _measure(trained, passes, split, top_k=top_k)
    notes = found | {name: [asdict(each) for each in found[name]] for name in ("tokens", "prompts")}
    write_lookahead(
        out,
        trained[0].weights,
        trained[0].shape,
        fingerprint=fingerprint,
        semantic_depth=found["semantic_depth"],
        notes=notes | {"training": asdict(options)},
    )
    return LookaheadReport(out, out.stat().st_size, **found)


def _measure(
    trained: Sequence[_Trained], passes: Passes, split: DocumentSplit, *, top_k: int
) -> dict[str, Any]:
    """What a report says beside the file."""
    _, shape, weights = trained[0]
    test, train = (passes.take(np.isin(passes.document, part)) for part in (split.test, split.train))
    counts = counts_of(shape.num_experts)
    single = test.take(~test.is_prompt)
    if not len(single):
        raise RequestError("the texts that are tested on have no single tokens; give longer or more texts")
    truth = shares_ahead(single, shape.window)
    return {
        "num_parameters": sum(part.numel() for part in weights),
        "num_passes": len(passes),
        "num_prompts": int(passes.is_prompt.sum()),
        "num_documents": {use: len(numbers) for use, numbers in asdict(split).items()},
        "has_images": bool(shape.visual_size),
        "load_entropy": float(load_entropies(passes.share.astype(np.float64).sum(axis=0)).mean()),
        "counts": counts,
        "most": tuple(min(1.0, count / top_k) for count in counts),
        "semantic_depth": semantic_depth(predicted(weights, shape, single), truth, counts[1]),
        "tokens": tuple(_recalls(trained, single, train, counts)),
        "prompts": tuple(_recalls(trained, test.take(test.is_prompt), train, counts)),
    }


def _train(
    name: str,
    passes: Passes,
    top_k: int,
    *,
    split: DocumentSplit,
    options: LookaheadOptions,
    progress: Progress | None,
) -> _Trained:
    shape = passes.shape(top_k)
    weights = train_lookahead(
        passes,
        shape,
        train=split.train,
        validation=split.validation,
        options=options,
        progress=None if progress is None else lambda at: progress(name, at),
    )
    return _Trained(name, shape, weights)


def _recalls(
    trained: Sequence[_Trained], test: Passes, train: Passes, counts: tuple[int, int, int]
) -> Iterator[HotRecall]:
    """Of all predictors and rivals, on passes of one kind; nothing without any."""
    if not len(test):
        return
    shape = trained[0].shape
    truth = shares_ahead(test, shape.window)
    for name, its_shape, weights in trained:
        passes = test if its_shape.visual_size else test.without_visual()
        yield from hot_recall(name, predicted(weights, its_shape, passes), truth, counts)
    for name, scores in rivals(test, train, shape.window):
        yield from hot_recall(name, scores, truth, counts)
    yield by_chance(shape.num_experts, counts)
