"""Where the calibration of a configuration lies, and whether it is this model's."""

from __future__ import annotations

import logging
from pathlib import Path

from hetero_runtime.beside_model import named_or_beside
from hetero_runtime.calibration.file import CALIBRATE, describe_calibration
from hetero_runtime.config.routing import READS
from hetero_runtime.config.tree import PrefetchConfig, RoutingConfig
from hetero_runtime.errors import CheckpointError, ConfigError
from hetero_runtime.plan.geometry import Geometry
from hetero_runtime.prediction.fingerprint import RouterFingerprint

CALIBRATION_SUFFIX = ".calibration.safetensors"

log = logging.getLogger(__name__)


def locate_calibration(config: RoutingConfig, geometry: Geometry) -> Path | None:
    """The file that `config` means; None where its policy reads none.

    `calibration: auto` is the file beside the model's folder, named like it. Raises ConfigError when there is
    none, CheckpointError for a file that is no calibration, or another model's.
    """
    if "calibration" not in READS[config.policy]:
        return None
    path = named_or_beside(config.calibration, geometry.path, CALIBRATION_SUFFIX)
    if not path.exists():
        raise ConfigError(
            f"routing.policy: {config.policy} needs a calibration of this model, and {path} does not exist; "
            f"{CALIBRATE} {geometry.path}, name the file in routing.calibration, or write "
            "routing.policy: exact"
        )
    describe_calibration(path, RouterFingerprint.of_model(geometry))
    return path


def locate_profile(config: PrefetchConfig, geometry: Geometry) -> Path | None:
    """The file that says which experts prompts use; None where the engine only counts, or fetches nothing.

    `auto` is the calibration beside the model's folder; where that is another model's, a warning says so and
    nothing is profiled. Raises ConfigError for a named file that does not exist, CheckpointError for one that
    is no calibration, or another model's.
    """
    if config.schedule == "none" or config.popularity == "none":
        return None
    is_auto = config.popularity == "auto"
    path = named_or_beside(config.popularity, geometry.path, CALIBRATION_SUFFIX)
    if not path.exists():
        if is_auto:
            return None
        raise ConfigError(
            f"prefetch.popularity: {path} does not exist; {CALIBRATE} {geometry.path}, or write "
            "prefetch.popularity: none"
        )
    try:
        describe_calibration(path, RouterFingerprint.of_model(geometry))
    except CheckpointError as error:
        if not is_auto:
            raise
        log.warning("prompts are fetched ahead without a profile: %s", error)
        return None
    return path
