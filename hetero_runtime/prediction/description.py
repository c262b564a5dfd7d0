"""What a predictor file says of itself, read without its weights and without torch."""

from __future__ import annotations

import json
from collections.abc import Set
from pathlib import Path
from typing import Any, NamedTuple

from hetero_runtime.config.tree import Horizon
from hetero_runtime.errors import CheckpointError
from hetero_runtime.prediction.fingerprint import RouterFingerprint
from hetero_runtime.prediction.metadata import read_metadata

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
    metadata = read_metadata(path, FORMAT, remedy=TRAIN_ANEW)
    try:
        described = json.loads(metadata.words["predictor"])
        fingerprint = RouterFingerprint(**described["fingerprint"])
        groups, notes = list(described["groups"]), dict(described["notes"])
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{path}: metadata `predictor` is incomplete ({error!r}); {TRAIN_ANEW}"
        ) from error
    return Description(fingerprint, groups, notes, metadata.num_bytes, _horizons(metadata.names))


def _horizons(names: Set[str]) -> tuple[Horizon, ...]:
    if REFINEMENT + "embedding" not in names:
        return ("step",)
    return ("step", "token", "layer") if REFINEMENT + "pool" in names else ("step", "token")
