"""A trace file in, a predictor file and its recall out."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from hetero_runtime.errors import DeviceError, RequestError
from hetero_runtime.prediction.file import write_predictor
from hetero_runtime.prediction.fingerprint import RouterFingerprint
from hetero_runtime.trace.file import TraceInfo, read_trace
from hetero_scheduler.predict.mamba2_training import PredictorShape, Trained, recall_of, train_predictor
from hetero_scheduler.predict.recall import Recall
from hetero_scheduler.predict.training import TrainingOptions, TrainingProgress
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


def train_from_trace(
    trace_path: Path,
    out: Path,
    *,
    shape: PredictorShape,
    options: TrainingOptions,
    device: str = "cpu",
    progress: Callable[[int, TrainingProgress], None] | None = None,
) -> TrainingReport:
    """Train on a trace, measure on its test documents, write `out`; the file's notes hold the report.

    Raises, before training starts, CheckpointError for a trace that cannot be read, RequestError for one with
    too little to learn from, DeviceError for a device or a folder that is not there.
    """
    _check_device(device)
    if not out.resolve().parent.is_dir():
        raise DeviceError(f"{out}: its folder does not exist; create it, or name another file")
    trace, info = read_trace(trace_path)
    try:
        trained = train_predictor(trace, shape, options=options, device=device, progress=progress)
        recalls = tuple(recall_of(trained, trace))
    except ValueError as error:
        raise RequestError(f"{trace_path}: {error}") from error
    return _keep(out, trained, trace=trace, info=info, options=options, recalls=recalls)


def _keep(
    out: Path,
    trained: Trained,
    *,
    trace: Trace,
    info: TraceInfo,
    options: TrainingOptions,
    recalls: tuple[Recall, ...],
) -> TrainingReport:
    """Write the predictor and say what it is."""
    documents = {use: len(numbers) for use, numbers in asdict(trained.split).items()}
    load_entropy = trace.load_entropy()
    notes: dict[str, Any] = {
        "trace": asdict(info) | {"num_tokens": trace.num_tokens, "load_entropy": load_entropy},
        "documents": documents,
        "training": asdict(options),
        "recall": [asdict(recall) for recall in recalls],
    }
    write_predictor(out, trained.models, fingerprint=RouterFingerprint.of_trace(trace, info), notes=notes)
    return TrainingReport(
        out=out,
        file_bytes=out.stat().st_size,
        num_parameters=sum(math.prod(p.shape) for model in trained.models for p in model.parameters()),
        num_tokens=trace.num_tokens,
        num_documents=documents,
        load_entropy=load_entropy,
        decoding=info.decoding,
        by_chance=trace.top_k / trace.num_experts,
        recalls=recalls,
    )


def _check_device(device: str) -> None:
    if device not in ("cpu", "cuda"):
        raise DeviceError(f"device is {device!r}; give cpu or cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise DeviceError("device is cuda, and torch sees no CUDA device; give --device cpu")
