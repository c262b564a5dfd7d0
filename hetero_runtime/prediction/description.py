"""What a predictor file says of itself, read without its weights and without torch."""

from __future__ import annotations

import json
from collections.abc import Set
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open

from hetero_runtime.checkpoint.safetensors_file import read_header
from hetero_runtime.config.tree import Horizon
from hetero_runtime.errors import CheckpointError
from hetero_runtime.prediction.fingerprint import RouterFingerprint

FORMAT = "hetero_runtime.predictor/1"
FOR_THIS_MODEL = (
    "Train one with `hetero-runtime trace` and `hetero-runtime train-predictor`, or name this model's "
    "predictor"
)
REFINEMENT = "refinement."
"""What names of a refinement's tensors begin with."""
TRAIN_ANEW = "train it anew with `hetero-runtime train-predictor`"


class Description(NamedTuple):
    """`groups`: the sizes of each group's model. `notes`: where the predictor comes from."""

    fingerprint: RouterFingerprint
    groups: list[dict[str, Any]]
    notes: dict[str, Any]
    num_bytes: int
    """Of the weights."""
    horizons: tuple[Horizon, ...]
    """How near its forecasts can be made anew, farthest first."""


def read_description(path: Path) -> Description:
    """Raises CheckpointError for a file that is missing, truncated or no predictor."""
    entries = read_header(path)  # missing or truncated: it says so
    num_bytes = sum(entry.num_bytes for entry in entries)
    try:
        with safe_open(path, "numpy") as file:
            metadata = file.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error}); {TRAIN_ANEW}") from error
    found = metadata.get("format")
    if found != FORMAT:
        raise CheckpointError(f"{path}: format is {found!r}, this version reads {FORMAT!r}; {TRAIN_ANEW}")
    try:
        described = json.loads(metadata["predictor"])
        fingerprint = RouterFingerprint(**described["fingerprint"])
        groups, notes = list(described["groups"]), dict(described["notes"])
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{path}: metadata `predictor` is incomplete ({error!r}); {TRAIN_ANEW}"
        ) from error
    return Description(fingerprint, groups, notes, num_bytes, _horizons({entry.key for entry in entries}))


def _horizons(names: Set[str]) -> tuple[Horizon, ...]:
    if REFINEMENT + "embedding" not in names:
        return ("step",)
    return ("step", "token", "layer") if REFINEMENT + "pool" in names else ("step", "token")
