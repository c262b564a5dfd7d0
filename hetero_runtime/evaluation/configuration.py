"""The configuration that an evaluation loads: the same function, by the way that is quickest for whole texts.

What a model says depends on its weights, the format of its experts and its routing policy. How a step is
driven and what is fetched when is speed alone, so that is set to what a full forward needs.
"""

from __future__ import annotations

from dataclasses import replace

from hetero_runtime.config import Config
from hetero_runtime.config.forecasts import acts_on_forecasts
from hetero_runtime.config.tree import (
    EvictionConfig,
    PredictionConfig,
    PrefetchConfig,
    RoutingConfig,
    VisionConfig,
)


def for_evaluation(config: Config) -> Config:
    """`config`, driven by the host and without forecasts. Numbers differ from the captured step's only as
    float sums in another order do."""
    eager = replace(config, execution=replace(config.execution, mode="eager"))
    if not acts_on_forecasts(config):
        return eager
    has_prefix = config.prediction.predictor == "lookahead_mlp"  # which says how many layers are pinned
    return replace(
        eager,
        prediction=config.prediction if has_prefix else PredictionConfig(),
        prefetch=PrefetchConfig(),
        eviction=EvictionConfig(),
    )


def exactly_routed(config: Config) -> Config:
    """The same, with the experts that the model's router chooses, and nothing that follows another choice."""
    return replace(
        for_evaluation(config),
        routing=RoutingConfig(),
        prediction=PredictionConfig(),
        prefetch=PrefetchConfig(),
        eviction=EvictionConfig(),
    )


def exact(config: Config) -> Config:
    """The model of `config` as its checkpoint has it: exactly routed, experts in their own format, all tokens
    of images."""
    return replace(
        exactly_routed(config),
        model=replace(config.model, experts="checkpoint"),
        vision=VisionConfig(),
    )
