"""Who forecasts and who acts on it."""

from __future__ import annotations

from hetero_runtime.config.tree import Config, ResolvedConfig

FORECAST_SCHEDULES = ("jsd", "moe_infinity", "promoe", "edf", "top_b")
"""Values of prefetch.schedule that act on forecasts."""
FORECAST_EVICTIONS = ("belady", "lookahead")
"""Values of eviction.policy that do."""
TRAINED = ("mamba2", "lookahead_mlp")
"""Values of prediction.predictor that read a file."""
_READ_WHOLE_TOKENS = ("mamba2", "frequency")
"""Predictors that read a prompt when all its tokens have been through all layers."""


def schedules_forecasts(schedule: str) -> bool:
    """Whether that value of prefetch.schedule acts on forecasts."""
    return schedule in FORECAST_SCHEDULES


def acts_on_forecasts(config: Config | ResolvedConfig) -> bool:
    """Whether anything listens to a predictor's forecasts."""
    return schedules_forecasts(config.prefetch.schedule) or config.eviction.policy in FORECAST_EVICTIONS


def reads_whole_tokens(config: Config) -> bool:
    """Whether something acts on forecasts that take tokens which have been through all layers."""
    return acts_on_forecasts(config) and config.prediction.predictor in _READ_WHOLE_TOKENS
