"""Who decides about experts besides the routers and the eviction policy."""

from __future__ import annotations

from typing import Any, NamedTuple

from hetero_runtime.config import ResolvedConfig
from hetero_runtime.foresight.build import make_predictors
from hetero_runtime.hf.loading import Skeleton
from hetero_runtime.routing import Routing
from hetero_runtime.routing.build import make_routing
from hetero_runtime.speculation import Speculation, make_speculation
from hetero_runtime.vision import Compressor
from hetero_runtime.vision.build import make_compressor
from hetero_scheduler.predict import Predictor


class Minds(NamedTuple):
    """Empty or None where the configuration asks for nobody."""

    predictors: list[Predictor]
    """Who says which experts are to come."""
    routing: Routing | None
    """Who selects in the routers' place."""
    speculation: Speculation | None
    """Who drafts tokens ahead."""
    compressor: Compressor | None
    """Who lets image tokens go."""


def make_minds(config: ResolvedConfig, skeleton: Skeleton, tokenizer: Any) -> Minds:
    """Those of `config` for the model in `skeleton`.

    Raises ConfigError or CheckpointError for what does not fit the model, before any weight is read.
    """
    model, architecture = skeleton.model, skeleton.architecture
    return Minds(
        predictors=make_predictors(config, model),
        speculation=make_speculation(config, tokenizer, model, architecture),
        routing=make_routing(config, model, architecture),
        compressor=make_compressor(config, model),
    )
