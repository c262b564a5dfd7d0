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
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from hetero_runtime.errors import CheckpointError
from hetero_runtime.prediction.fingerprint import RouterFingerprint
from hetero_runtime.prediction.metadata import read_metadata
from hetero_runtime.whole_file import write_whole
from hetero_scheduler.routing import Calibration, TokenPrior

FORMAT = "hetero_runtime.calibration/1"
CALIBRATE = "calibrate with `hetero-runtime calibrate routing`"
_NAMES = {"score_range", "uses", "tokens", "share"}


Notes = dict[str, Any]
"""The texts that a calibration comes from."""


class StoredCalibration(NamedTuple):
    """What a file holds."""

    calibration: Calibration
    fingerprint: RouterFingerprint
    notes: Notes


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


def describe_calibration(
    path: Path, model: RouterFingerprint | None = None
) -> tuple[RouterFingerprint, Notes]:
    """Whose calibration `path` is, and its notes; its numbers are not read.

    `model`: the model that it shall serve; None takes any. Raises CheckpointError for a file that is missing,
    truncated or no calibration, and for one of another model.
    """
    metadata = read_metadata(path, FORMAT, remedy=CALIBRATE)
    try:
        described = json.loads(metadata.words["calibration"])
        fingerprint = RouterFingerprint(**described["fingerprint"])
        notes = dict(described["notes"])
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: is incomplete ({error!r}); {CALIBRATE}") from error
    if missing := _NAMES - metadata.names:
        raise CheckpointError(f"{path}: is incomplete (no {', '.join(sorted(missing))}); {CALIBRATE}")
    if model is not None:
        fingerprint.check(model, str(path), remedy=f"Name this model's calibration, or {CALIBRATE}")
    return fingerprint, notes


def read_calibration(path: Path, model: RouterFingerprint | None = None) -> StoredCalibration:
    """A calibration that `write_calibration` wrote. Arguments and errors as of `describe_calibration`."""
    fingerprint, notes = describe_calibration(path, model)
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error}); {CALIBRATE}") from error
    try:
        calibration = _calibration(tensors)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: is incomplete ({error!r}); {CALIBRATE}") from error
    return StoredCalibration(calibration, fingerprint, notes)


def _calibration(tensors: Mapping[str, Any]) -> Calibration:
    share = tensors["share"]
    nothing = np.zeros((1, *share.shape[1:]), np.uint8)
    prior = TokenPrior(tensors["tokens"], np.concatenate([share, nothing]))
    return Calibration(tensors["score_range"], tensors["uses"], prior)
