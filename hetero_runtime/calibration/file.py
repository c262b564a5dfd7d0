"""A calibration on disk: one safetensors file.

score_range  float64 [L]        mean of max - min of a layer's selection scores
uses         float64 [L, E]     how often the router chose each expert
tokens       int64   [N]        tokens that have a prior, ascending
share        uint8   [N, L, E]  how often a layer routes each of them to each expert, in 256ths
metadata     "format": FORMAT, "calibration": JSON of the fingerprint and notes
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from hetero_runtime.checkpoint.safetensors_file import read_header
from hetero_runtime.errors import CheckpointError
from hetero_runtime.prediction.fingerprint import RouterFingerprint
from hetero_runtime.whole_file import write_whole
from hetero_scheduler.routing import Calibration, TokenPrior

FORMAT = "hetero_runtime.calibration/1"
CALIBRATE = "calibrate with `hetero-runtime calibrate routing`"
_NAMES = {"score_range", "uses", "tokens", "share"}


class StoredCalibration(NamedTuple):
    """What a file holds. `notes`: the texts that it comes from."""

    calibration: Calibration
    fingerprint: RouterFingerprint
    notes: dict[str, Any]


def write_calibration(
    path: Path, calibration: Calibration, *, fingerprint: RouterFingerprint, notes: Mapping[str, Any]
) -> None:
    """Write atomically: `path` holds the whole calibration or what it held before. Raises DeviceError."""
    tensors: dict[str, npt.NDArray[Any]] = {
        "score_range": calibration.score_range,
        "uses": calibration.uses,
        "tokens": calibration.prior.tokens,
        "share": np.ascontiguousarray(calibration.prior.share[:-1]),
    }
    described = {"fingerprint": asdict(fingerprint), "notes": dict(notes)}
    metadata = {"format": FORMAT, "calibration": json.dumps(described)}
    write_whole(path, lambda unfinished: unfinished.write_bytes(save(tensors, metadata)))


def read_calibration(path: Path, model: RouterFingerprint | None = None) -> StoredCalibration:
    """A calibration that `write_calibration` wrote.

    `model`: the model that it shall serve; None takes any. Raises CheckpointError for a file that is missing,
    truncated or no calibration, and for one of another model.
    """
    read_header(path)  # missing or truncated: it says so
    try:
        with safe_open(path, "numpy") as file:
            metadata, found = file.metadata() or {}, set(file.keys())
            tensors = {name: file.get_tensor(name) for name in _NAMES & found}
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error}); {CALIBRATE}") from error
    if metadata.get("format") != FORMAT:
        raise CheckpointError(
            f"{path}: format is {metadata.get('format')!r}, this version reads {FORMAT!r}; {CALIBRATE}"
        )
    try:
        described = json.loads(metadata["calibration"])
        fingerprint = RouterFingerprint(**described["fingerprint"])
        notes = dict(described["notes"])
        calibration = _calibration(tensors)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: is incomplete ({error!r}); {CALIBRATE}") from error
    if model is not None:
        fingerprint.check(model, str(path), remedy=f"Name this model's calibration, or {CALIBRATE}")
    return StoredCalibration(calibration, fingerprint, notes)


def _calibration(tensors: Mapping[str, Any]) -> Calibration:
    share = tensors["share"]
    nothing = np.zeros((1, *share.shape[1:]), np.uint8)
    prior = TokenPrior(tensors["tokens"], np.concatenate([share, nothing]))
    return Calibration(tensors["score_range"], tensors["uses"], prior)
