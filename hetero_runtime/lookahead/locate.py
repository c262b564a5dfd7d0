"""Where the lookahead predictor of a configuration lies, whose it is, and what goes with it."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from hetero_runtime.beside_model import beside, named_or_beside
from hetero_runtime.config.tree import PredictionConfig
from hetero_runtime.errors import ConfigError
from hetero_runtime.lookahead.description import CALIBRATE, LOOKAHEAD_SUFFIX, read_lookahead_description
from hetero_runtime.lookahead.profile import PREFIX_SUFFIX, read_profiles
from hetero_runtime.plan.geometry import Geometry, LookaheadGeometry
from hetero_runtime.plan.prefix import ProfiledPrefix
from hetero_runtime.prediction.fingerprint import RouterFingerprint


class LocatedLookahead(NamedTuple):
    """A lookahead predictor that was made for the model in question."""

    path: Path
    geometry: LookaheadGeometry


def locate_lookahead(config: PredictionConfig, geometry: Geometry, *, device: str) -> LocatedLookahead | None:
    """The file that `config` means; None where its predictor is another one.

    `path: auto` is the file beside the model's folder, named like it. Profiles of prefixes on `device` are
    read where they lie beside the model. Raises ConfigError when there is no predictor,
    CheckpointError for files that are none, or another model's.
    """
    if config.predictor != "lookahead_mlp":
        return None
    path = named_or_beside(config.path, geometry.path, LOOKAHEAD_SUFFIX)
    if not path.exists():
        raise ConfigError(
            f"prediction.predictor: lookahead_mlp needs a predictor of this model, and {path} does not "
            f"exist; {CALIBRATE}, name it in prediction.path, or write prediction.predictor: frequency"
        )
    described, model = read_lookahead_description(path), RouterFingerprint.of_model(geometry)
    described.fingerprint.check(model, str(path), remedy=f"Name this model's predictor, or {CALIBRATE}")
    profiles = read_profiles(beside(geometry.path, PREFIX_SUFFIX), model)
    profiled = tuple(
        ProfiledPrefix(profile.num_experts, profile.best.pinned)
        for profile in profiles
        if profile.device == device
    )
    return LocatedLookahead(path, LookaheadGeometry(described.num_bytes, described.semantic_depth, profiled))
