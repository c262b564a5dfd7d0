"""A trained predictor on disk: one safetensors file.

groups.G.NAME     float32   parameter NAME of group G's model (names inside a mixer: mamba_ssm's Mamba2)
refinement.NAME   float16   part NAME of a Refinement, where one was learned
metadata          "format": FORMAT, "predictor": JSON of the fingerprint, each group's shape, and notes
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from hetero_runtime.errors import CheckpointError
from hetero_runtime.prediction.description import (
    FOR_THIS_MODEL,
    FORMAT,
    REFINEMENT,
    TRAIN_ANEW,
    read_description,
)
from hetero_runtime.prediction.fingerprint import RouterFingerprint
from hetero_runtime.whole_file import write_whole
from hetero_scheduler.predict.mamba2_block import Mamba2Sizes
from hetero_scheduler.predict.mamba2_model import GroupModel, GroupShape
from hetero_scheduler.predict.refinement import Refinement


class StoredPredictor(NamedTuple):
    """What a file holds; with `predictors_of` it predicts."""

    models: tuple[GroupModel, ...]
    fingerprint: RouterFingerprint
    notes: dict[str, Any]
    """Where it comes from: the trace, the training, the recall."""
    refinement: Refinement | None
    """What forecasts gain from the token and from the next router; None where none was learned."""


def write_predictor(
    path: Path,
    models: Sequence[GroupModel],
    *,
    fingerprint: RouterFingerprint,
    notes: Mapping[str, Any],
    refinement: Refinement | None = None,
) -> None:
    """Write atomically: `path` holds the whole predictor or what it held before. Raises DeviceError."""
    tensors = {
        f"groups.{g}.{name}": tensor.detach().float().cpu().contiguous()
        for g, model in enumerate(models)
        for name, tensor in model.state_dict().items()
    }
    if refinement is not None:
        parts = {name: part for name, part in vars(refinement).items() if part is not None}
        tensors |= {REFINEMENT + name: torch.from_numpy(part).half() for name, part in parts.items()}
    described = {
        "fingerprint": asdict(fingerprint),
        "groups": [asdict(model.shape) for model in models],
        "notes": dict(notes),
    }
    metadata = {"format": FORMAT, "predictor": json.dumps(described)}
    write_whole(path, lambda unfinished: unfinished.write_bytes(save(tensors, metadata)))


def read_predictor(path: str | Path, model: RouterFingerprint | None = None) -> StoredPredictor:
    """A predictor that `write_predictor` wrote, ready to predict.

    `model`: the model that it shall serve; None takes any. Raises CheckpointError for a file that is missing,
    truncated or no predictor, and for one that was trained for another model.
    """
    path = Path(path)
    described = read_description(path)
    try:
        shapes = [_shape(group) for group in described.groups]
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{path}: metadata `predictor` is incomplete ({error!r}); {TRAIN_ANEW}"
        ) from error
    if model is not None:
        described.fingerprint.check(model, str(path), remedy=FOR_THIS_MODEL)
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error}); {TRAIN_ANEW}") from error
    models = tuple(_load(path, g, shape, tensors) for g, shape in enumerate(shapes))
    return StoredPredictor(models, described.fingerprint, described.notes, _refinement(path, tensors))


def _shape(described: dict[str, Any]) -> GroupShape:
    return GroupShape(**{**described, "sizes": Mamba2Sizes(**described["sizes"])})


def _load(path: Path, group: int, shape: GroupShape, tensors: Mapping[str, Tensor]) -> GroupModel:
    prefix = f"groups.{group}."
    weights = {
        name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)
    }
    model = GroupModel(shape)
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise CheckpointError(
            f"{path}: the weights of group {group} do not fit its shape; {TRAIN_ANEW}"
        ) from error
    return model.eval().requires_grad_(False)


def _refinement(path: Path, tensors: Mapping[str, Tensor]) -> Refinement | None:
    names = [field.name for field in fields(Refinement)]
    parts = {name: tensors.get(REFINEMENT + name) for name in names}
    if all(part is None for part in parts.values()):
        return None
    arrays = {name: None if part is None else part.numpy().astype(np.float32) for name, part in parts.items()}
    try:
        return Refinement(**arrays)  # type: ignore[arg-type]  # a part that is missing raises
    except (AttributeError, ValueError) as error:
        raise CheckpointError(f"{path}: its refinement is not whole ({error}); {TRAIN_ANEW}") from error
