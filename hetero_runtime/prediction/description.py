"""What a predictor file says of itself, read without its weights and without torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open

from hetero_runtime.checkpoint.safetensors_file import read_header
from hetero_runtime.errors import CheckpointError
from hetero_runtime.prediction.fingerprint import RouterFingerprint

FORMAT = "hetero_runtime.predictor/1"
FOR_THIS_MODEL = (
    "Train one with `hetero-runtime trace` and `hetero-runtime train-predictor`, or name this model's "
    "predictor"
)
TRAIN_ANEW = "train it anew with `hetero-runtime train-predictor`"


class Description(NamedTuple):
    """`groups`: the sizes of each group's model. `notes`: where the predictor comes from."""

    fingerprint: RouterFingerprint
    groups: list[dict[str, Any]]
    notes: dict[str, Any]
    num_bytes: int
    """Of the weights."""


def read_description(path: Path) -> Description:
    """Raises CheckpointError for a file that is missing, truncated or no predictor."""
    num_bytes = sum(entry.num_bytes for entry in read_header(path))  # missing or truncated: it says so
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
        return Description(fingerprint, list(described["groups"]), dict(described["notes"]), num_bytes)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{path}: metadata `predictor` is incomplete ({error!r}); {TRAIN_ANEW}"
        ) from error
