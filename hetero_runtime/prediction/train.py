"""A trace file in, a predictor file and its recall out."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from hetero_runtime.errors import DeviceError, RequestError
from hetero_runtime.prediction.file import read_predictor, write_predictor
from hetero_runtime.prediction.fingerprint import RouterFingerprint
from hetero_runtime.trace.file import TraceInfo, read_trace
from hetero_runtime.whole_file import check_folder
from hetero_scheduler.predict.mamba2_training import PredictorShape, Trained, recall_of, train_predictor
from hetero_scheduler.predict.recall import Recall, refined_recall
from hetero_scheduler.predict.refinement import Refinement
from hetero_scheduler.predict.refinement_training import (
    RefinementOptions,
    RefinementProgress,
    one_step_shares,
    train_refinement,
)
from hetero_scheduler.predict.training import TrainingOptions, TrainingProgress
from hetero_scheduler.predict.training_data import split_documents
from hetero_scheduler.trace import Trace


@dataclass(frozen=True)
class TrainingReport:
    """What was trained, on what, and how well it predicts documents that it has not seen."""

    out: Path
    file_bytes: int
    num_parameters: int
    num_tokens: int
    num_documents: dict[str, int]
    """By use: train, validation, test."""
    load_entropy: float
    """Of the trace; below about 0.95 high recall says little."""
    decoding: str
    by_chance: float
    """Recall@k of a guess: K / E."""
    recalls: tuple[Recall, ...]


class TrainingWatch(NamedTuple):
    """Told after every epoch: of the group that trains, and of the refinement."""

    training: Callable[[int, TrainingProgress], None]
    refining: Callable[[RefinementProgress], None]


class Taught(NamedTuple):
    """Everything that goes into a predictor's file."""

    trained: Trained
    refinement: Refinement | None
    notes: dict[str, Any]
    """Where both come from."""


def train_from_trace(
    trace_path: Path,
    out: Path,
    *,
    shape: PredictorShape,
    options: TrainingOptions,
    refining: RefinementOptions | None = None,
    kept: Path | None = None,
    device: str = "cpu",
    watch: TrainingWatch | None = None,
) -> TrainingReport:
    """Train on a trace, measure on its test documents, write `out`; the file's notes hold the report.

    `refining`: how to learn what the token, and the next router where the trace holds it, add to forecasts;
    None learns none of it. `kept`: a predictor of this model that is not trained anew, only refined.

    Raises, before training starts, CheckpointError for a trace that cannot be read, RequestError for one with
    too little to learn from, DeviceError for a device or a folder that is not there.
    """
    _check_device(device)
    check_folder(out)
    trace, info = read_trace(trace_path)
    lesson = {"trace": asdict(info) | {"num_tokens": trace.num_tokens, "load_entropy": trace.load_entropy()}}
    try:
        if kept is None:
            progress = watch and watch.training
            trained = train_predictor(trace, shape, options=options, device=device, progress=progress)
            about_models = lesson | {"documents": _documents(trained), "training": asdict(options)}
        else:
            trained, about_models = _kept(kept, trace, info, seed=options.seed)
        recalls = recall_of(trained, trace)
    except ValueError as error:
        raise RequestError(f"{trace_path}: {error}") from error
    taught = Taught(trained, None, about_models)
    if refining is not None:
        for model in trained.models:
            model.to(device)
        shares = one_step_shares(trained.models, trace)
        refinement = train_refinement(
            trace,
            shares,
            split=trained.split,
            options=refining,
            device=device,
            progress=watch and watch.refining,
        )
        recalls += refined_recall(refinement, shares, trace, test=trained.split.test)
        learned = lesson | {"documents": _documents(trained), "training": asdict(refining)}
        taught = Taught(trained, refinement, about_models | {"refinement": learned})
    return _keep(out, taught, trace=trace, info=info, recalls=recalls)


def _kept(path: Path, trace: Trace, info: TraceInfo, *, seed: int) -> tuple[Trained, dict[str, Any]]:
    """A stored predictor with the split of `trace`, and what its file says of its models."""
    stored = read_predictor(path, RouterFingerprint.of_trace(trace, info))
    about_models = {name: stored.notes[name] for name in ("trace", "documents", "training")}
    return Trained(stored.models, split_documents(len(trace.bounds) - 1, seed=seed)), about_models


def _keep(
    out: Path, taught: Taught, *, trace: Trace, info: TraceInfo, recalls: list[Recall]
) -> TrainingReport:
    """Write the predictor and say what it is."""
    trained, refinement, notes = taught
    write_predictor(
        out,
        trained.models,
        fingerprint=RouterFingerprint.of_trace(trace, info),
        notes=notes | {"recall": [asdict(recall) for recall in recalls]},
        refinement=refinement,
    )
    num_parameters = sum(math.prod(p.shape) for model in trained.models for p in model.parameters())
    if refinement is not None:
        num_parameters += sum(part.size for part in vars(refinement).values() if part is not None)
    return TrainingReport(
        out=out,
        file_bytes=out.stat().st_size,
        num_parameters=num_parameters,
        num_tokens=trace.num_tokens,
        num_documents=_documents(trained),
        load_entropy=trace.load_entropy(),
        decoding=info.decoding,
        by_chance=trace.top_k / trace.num_experts,
        recalls=tuple(recalls),
    )


def _documents(trained: Trained) -> dict[str, int]:
    """How many serve what."""
    return {use: len(numbers) for use, numbers in asdict(trained.split).items()}


def _check_device(device: str) -> None:
    if device not in ("cpu", "cuda"):
        raise DeviceError(f"device is {device!r}; give cpu or cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise DeviceError("device is cuda, and torch sees no CUDA device; give --device cpu")
