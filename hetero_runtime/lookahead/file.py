"""A lookahead predictor on disk: one safetensors file.

NAME      float16   part NAME of LookaheadWeights
metadata  "format": FORMAT, "lookahead": JSON of the fingerprint, the sizes, the semantic depth and notes
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save

from hetero_runtime.errors import CheckpointError
from hetero_runtime.lookahead.description import (
    CALIBRATE,
    FORMAT,
    LookaheadFile,
    read_lookahead_description,
)
from hetero_runtime.prediction.fingerprint import RouterFingerprint
from hetero_runtime.whole_file import write_whole
from hetero_scheduler.predict.lookahead_features import LookaheadShape
from hetero_scheduler.predict.lookahead_model import LookaheadWeights


class StoredLookahead(NamedTuple):
    """Weights as float32 on the CPU, and what the file says of them."""

    weights: LookaheadWeights
    description: LookaheadFile


def write_lookahead(
    path: Path,
    weights: LookaheadWeights,
    shape: LookaheadShape,
    *,
    fingerprint: RouterFingerprint,
    semantic_depth: int,
    notes: Mapping[str, Any],
) -> None:
    """Write atomically: `path` holds the whole predictor or what it held before. Raises DeviceError."""
    tensors = {name: part.half().contiguous() for name, part in weights._asdict().items()}
    described = {
        "fingerprint": asdict(fingerprint),
        "shape": shape._asdict(),
        "semantic_depth": semantic_depth,
        "notes": dict(notes),
    }
    metadata = {"format": FORMAT, "lookahead": json.dumps(described)}
    write_whole(path, lambda unfinished: unfinished.write_bytes(save(tensors, metadata)))


def read_lookahead(path: str | Path, model: RouterFingerprint | None = None) -> StoredLookahead:
    """A predictor that `write_lookahead` wrote.

    `model`: the model that it shall serve; None takes any. Raises CheckpointError for a file that is missing,
    truncated or no lookahead predictor, and for one of another model.
    """
    path = Path(path)
    description = read_lookahead_description(path)
    if model is not None:
        description.fingerprint.check(model, str(path), remedy=f"Name this model's predictor, or {CALIBRATE}")
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error}); {CALIBRATE}") from error
    try:
        weights = LookaheadWeights(**tensors).to("cpu", torch.float32)
    except TypeError as error:
        raise CheckpointError(f"{path}: its weights are not whole ({error}); {CALIBRATE}") from error
    _check_sizes(path, weights, description.shape)
    return StoredLookahead(weights, description)


def _check_sizes(path: Path, weights: LookaheadWeights, shape: LookaheadShape) -> None:
    layers, width = shape.num_speaking, weights.inner.shape[-1]
    outputs = shape.window * shape.num_experts
    expected = (
        (layers, shape.history_size + shape.hidden_size, width),
        (layers, shape.visual_size, width),
        (layers, width),
        (layers, width, width),
        (layers, width),
        (layers, width, outputs),
        (layers, outputs),
    )
    for (name, part), sizes in zip(weights._asdict().items(), expected, strict=True):
        if tuple(part.shape) != sizes:
            raise CheckpointError(
                f"{path}: {name} is {list(part.shape)}, and its sizes say {list(sizes)}; {CALIBRATE}"
            )
