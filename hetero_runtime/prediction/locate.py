"""Where the trained predictor of a configuration lies, and whether it is this model's."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from hetero_runtime.beside_model import named_or_beside
from hetero_runtime.config.tree import Horizon, PredictionConfig
from hetero_runtime.errors import ConfigError
from hetero_runtime.plan.geometry import Geometry
from hetero_runtime.prediction.description import FOR_THIS_MODEL, read_description
from hetero_runtime.prediction.fingerprint import RouterFingerprint

PREDICTOR_SUFFIX = ".predictor.safetensors"


class Located(NamedTuple):
    """A predictor file that was trained for the model in question."""

    path: Path
    num_bytes: int
    """Of its weights."""
    horizons: tuple[Horizon, ...]
    """How near its forecasts can be made anew, farthest first."""


def locate_predictor(config: PredictionConfig, geometry: Geometry) -> Located | None:
    """The file that `config` means; None where its predictor is not a trained one.

    `path: auto` is the file beside the model's folder, named like it: `model.predictor.safetensors` is of
    `model/`. Raises ConfigError when there is none or it has not learned the horizon, CheckpointError for a
    file that is no predictor, or was trained for another model.
    """
    if config.predictor != "mamba2":
        return None
    path = named_or_beside(config.path, geometry.path, PREDICTOR_SUFFIX)
    if not path.exists():
        raise ConfigError(
            f"prediction.predictor: mamba2 needs a predictor trained for this model, and {path} does not "
            "exist; train one with `hetero-runtime trace` and `hetero-runtime train-predictor`, name it in "
            "prediction.path, or write prediction.predictor: frequency"
        )
    described = read_description(path)
    described.fingerprint.check(RouterFingerprint.of_model(geometry), str(path), remedy=FOR_THIS_MODEL)
    if config.horizon not in ("auto", *described.horizons):
        raise ConfigError(
            f"prediction.horizon: {config.horizon} is not what {path} has learned, which is "
            f"{', '.join(described.horizons)}; write prediction.horizon: auto, or train a predictor on a "
            "trace that was recorded with --early"
        )
    return Located(path, described.num_bytes, described.horizons)
