"""Where the calibration of a configuration lies, and whether it is this model's."""

from __future__ import annotations

from pathlib import Path

from hetero_runtime.calibration.file import CALIBRATE, read_calibration
from hetero_runtime.config.routing import READS
from hetero_runtime.config.tree import RoutingConfig
from hetero_runtime.errors import ConfigError
from hetero_runtime.plan.geometry import Geometry
from hetero_runtime.prediction.fingerprint import RouterFingerprint
from hetero_runtime.prediction.locate import beside

CALIBRATION_SUFFIX = ".calibration.safetensors"


def locate_calibration(config: RoutingConfig, geometry: Geometry) -> Path | None:
    """The file that `config` means; None where its policy reads none.

    `calibration: auto` is the file beside the model's folder, named like it. Raises ConfigError when there is
    none, CheckpointError for a file that is no calibration, or another model's.
    """
    if "calibration" not in READS[config.policy]:
        return None
    is_auto = config.calibration == "auto"
    path = beside(geometry.path, CALIBRATION_SUFFIX) if is_auto else Path(config.calibration).expanduser()
    if not path.exists():
        raise ConfigError(
            f"routing.policy: {config.policy} needs a calibration of this model, and {path} does not exist; "
            f"{CALIBRATE} {geometry.path}, name the file in routing.calibration, or write "
            "routing.policy: exact"
        )
    read_calibration(path, RouterFingerprint.of_model(geometry))
    return path
