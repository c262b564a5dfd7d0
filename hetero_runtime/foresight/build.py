"""The parts of a foresight, from a resolved configuration."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from hetero_gpu import SlabCache
from hetero_runtime.config import ResolvedConfig
from hetero_runtime.config.forecasts import TRAINED, acts_on_forecasts, schedules_forecasts
from hetero_runtime.foresight.foresight import Foresight
from hetero_runtime.foresight.link import Link
from hetero_runtime.foresight.pace import Pace
from hetero_runtime.foresight.prefetcher import Prefetcher
from hetero_runtime.foresight.rival import Rival
from hetero_runtime.foresight.rolling import RollingText
from hetero_runtime.foresight.rows import Row, Rows
from hetero_runtime.foresight.text import Text
from hetero_runtime.hf.early_routers import EarlyRouters
from hetero_runtime.hf.router_hooks import routed_layers, router_top_k
from hetero_scheduler import EvictionPolicy, make_eviction
from hetero_scheduler.eviction.belady_rows import BeladyRows
from hetero_scheduler.predict import Predictor, RouterShape, make_predictor
from hetero_scheduler.predict.refined import Refined
from hetero_scheduler.prefetch import make_schedule
from hetero_scheduler.prefetch.steering import Steering

if TYPE_CHECKING:
    from hetero_scheduler.predict.lookahead_mlp import LookaheadMlp
    from hetero_scheduler.predict.mamba2 import Mamba2Predictor


def make_predictors(config: ResolvedConfig, model: Any) -> list[Predictor]:
    """A predictor for each row, where `config` has something that acts on forecasts; none otherwise.

    `model`: it may still be without weights. Raises CheckpointError for a file that does not load and for a
    model whose routers cannot be listened to.
    """
    if not acts_on_forecasts(config) or config.prediction.predictor == "pregate":  # that is in the graph
        return []
    shape = router_shape(model)
    rows = range(config.execution.max_rows)
    if config.prediction.predictor == "lookahead_mlp":
        return list(_lookahead_predictors(config, len(rows)))
    if config.prediction.predictor == "frequency":
        num_groups = min(2, shape.num_layers)
        return [make_predictor("frequency", shape, num_groups=num_groups) for _ in rows]
    from hetero_runtime.prediction import read_predictor
    from hetero_runtime.prediction.horizons import predictors_of

    stored = read_predictor(config.prediction.path)
    assert config.prediction.horizon != "auto", "where the predictor lies, its horizon was decided too"
    predictors = predictors_of(stored, len(rows), nearest=config.prediction.horizon)
    for layer in range(shape.num_layers):  # compile now, not while somebody waits for a token
        predictors[0].observe(0, layer, np.zeros(shape.num_experts, np.float32))
    predictors[0].reset()
    return predictors


def _lookahead_predictors(config: ResolvedConfig, count: int) -> list[LookaheadMlp]:
    """On the device that computes: half the bytes there, where a GPU converts nothing."""
    from hetero_runtime.lookahead.file import read_lookahead
    from hetero_scheduler.predict.lookahead_mlp import LookaheadMlp

    weights, description = read_lookahead(config.prediction.path)
    dtype = torch.bfloat16 if config.torch_device == "cuda" else torch.float32
    first = LookaheadMlp(weights.to(config.torch_device, dtype), description.shape)
    return [first, *(first.another() for _ in range(count - 1))]


def extra_in_graph(config: ResolvedConfig) -> int | None:
    """Experts of a layer beyond top-k that a captured step prefetches by guess or forecast; None for none."""
    is_captured = config.prediction.predictor in ("pregate", *TRAINED)
    return config.prefetch.extra if is_captured else None


def followed_in_graph(config: ResolvedConfig, predictors: Sequence[Predictor]) -> list[Mamba2Predictor]:
    """Those of `predictors` that a captured step can go on from, without what refines them."""
    if config.execution.mode != "graph" or not predictors:
        return []
    from hetero_scheduler.predict.mamba2 import Mamba2Predictor

    plain = [each.predictor if isinstance(each, Refined) else each for each in predictors]
    return [predictor for predictor in plain if isinstance(predictor, Mamba2Predictor)]


def rolling_in_graph(config: ResolvedConfig, predictors: Sequence[Predictor]) -> list[LookaheadMlp]:
    """Those of `predictors` that a captured step can go on from and that speak at every layer."""
    if config.execution.mode != "graph" or not predictors:
        return []
    from hetero_scheduler.predict.lookahead_mlp import LookaheadMlp

    return [predictor for predictor in predictors if isinstance(predictor, LookaheadMlp)]


def refined_in_graph(config: ResolvedConfig, predictors: Sequence[Predictor]) -> Refined | None:
    """By what a captured step makes forecasts anew, and how near; None where it does not."""
    if config.execution.mode != "graph" or not predictors or not isinstance(predictors[0], Refined):
        return None
    return predictors[0]


def router_shape(model: Any) -> RouterShape:
    """Sizes of the model's routing. Raises CheckpointError for routers that cannot be listened to."""
    layers = routed_layers(model)
    return RouterShape(len(layers), layers[0].num_experts, router_top_k(model))


def make_row_eviction(config: ResolvedConfig, *, num_layers: int, num_experts: int) -> EvictionPolicy:
    """The eviction policy; one that acts on forecasts looks at all rows."""
    if config.eviction.policy == "belady":
        return BeladyRows(num_layers, num_experts, num_rows=config.execution.max_rows)
    return make_eviction(config.eviction.policy, num_layers=num_layers, num_experts=num_experts)


class Listening(NamedTuple):
    """Who listens to whose routers: a predictor for each row."""

    model: Any
    predictors: list[Predictor]
    shape: RouterShape


def make_foresight(
    config: ResolvedConfig,
    listening: Listening,
    *,
    cache: SlabCache,
    eviction: EvictionPolicy,
    link: Link,
) -> Foresight:
    """Put together what acts on forecasts. On a link that overlaps with nothing that is eviction alone: a
    prefetch would be a wait for an expert that may not be needed."""
    model, predictors, (num_layers, num_experts, top_k) = listening
    texts = _texts(model, predictors, listening.shape)
    schedule = None
    if link.overlaps and schedules_forecasts(config.prefetch.schedule):
        looks_at_next = predictors[0].asks_early or texts[0].orders_prompts
        schedule = make_schedule(config.prefetch.schedule, num_layers=num_layers, looks_at_next=looks_at_next)
    steering = Steering(
        schedule,
        eviction,
        num_layers=num_layers,
        per_layer=min(top_k + config.prefetch.extra, num_experts),
        is_shared=config.memory.pool == "global",
    )
    pace = Pace()
    prefetcher = Prefetcher(cache, steering, link=link, pace=pace, top_k=top_k)
    return Foresight(
        cache,
        Rows(texts),
        steering=steering,
        prefetcher=prefetcher,
        pace=pace,
        rival=Rival([cache.pool(layer) for layer in range(num_layers)], num_experts=num_experts),
    )


def _texts(model: Any, predictors: list[Predictor], shape: RouterShape) -> list[Text]:
    """A place for a text by each predictor."""
    from hetero_scheduler.predict.lookahead_mlp import LookaheadMlp

    early_routers = EarlyRouters(model) if predictors[0].asks_early else None
    return [
        RollingText(predictor)
        if isinstance(predictor, LookaheadMlp)
        else Row(predictor, shape, early_routers)
        for predictor in predictors
    ]
