"""Who looks ahead around a captured step: asks for prefetches in it, reads its prompts, orders their experts.

pregate         the next layer's router, asked early                      prompts by popularity
mamba2          steps to come; its host twin reads prompts                prompts by popularity
lookahead_mlp   layers to come; its host twin reads prompts               and says what comes next in them
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from hetero_gpu.control import ControlRegion
from hetero_gpu.foresight import Room
from hetero_gpu.tables import DeviceTables
from hetero_runtime.foresight.build import router_shape
from hetero_runtime.foresight.prompts import Prompts
from hetero_runtime.foresight.rolling_prompts import RollingPrompts
from hetero_runtime.foresight.sight import make_sight
from hetero_runtime.hf.early_routers import EarlyRouters
from hetero_runtime.hf.graph_sequences import GraphSequences, Texts
from hetero_runtime.hf.pregate import PreGate
from hetero_runtime.hf.router_hooks import listen_to_routers, router_top_k
from hetero_runtime.orchestrator.captured_foresight import CapturedForesight, Nearer
from hetero_runtime.orchestrator.captured_lookahead import CapturedLookahead
from hetero_runtime.orchestrator.captured_prefetch import Asker, AskOneLayerAhead
from hetero_runtime.orchestrator.grouped import ForeseesPrompts
from hetero_runtime.vision import Compressor
from hetero_scheduler.eviction.lookahead import Lookahead

if TYPE_CHECKING:
    from hetero_runtime.mode import EagerParts


class Ahead(NamedTuple):
    """Nobody looks ahead where there is no asker."""

    asker: Asker | None = None
    texts: Texts | None = None
    """Who is told of texts in rows."""
    foresees: ForeseesPrompts | None = None
    """Who says of a prompt what comes next in it."""
    listen: Callable[[GraphSequences], None] = lambda _sequences: None
    """Hooks them into the model, once nothing else can go wrong."""


def look_ahead(
    parts: EagerParts,
    tables: DeviceTables,
    region: ControlRegion,
    *,
    active: torch.Tensor,
    num_wanted: int,
    compressor: Compressor | None,
) -> Ahead:
    """Who says what is prefetched, `num_wanted` experts of a layer. `active`, `compressor`: as for `capture`.
    Each layer keeps the slots back that a step can need."""
    kept_back = min(len(active) * router_top_k(parts.model), parts.store.num_experts)
    if parts.lookahead:
        asker = _lookahead(parts, tables, region, active=active, room=(num_wanted, kept_back))
        prompts = RollingPrompts(parts.lookahead, device=asker.predictor)
        return Ahead(asker, prompts, prompts, partial(_listen_rolling, parts, prompts, compressor))
    if parts.predictors:
        foresight = _foresight(parts, tables, region, active=active, room=(num_wanted, kept_back))
        read = Prompts(parts.predictors, router_shape(parts.model), device=foresight)
        return Ahead(foresight, read, None, partial(_listen_foreseeing, parts, read, foresight))
    guess = PreGate(parts.model, num_guesses=num_wanted, active=active)
    return Ahead(AskOneLayerAhead(guess, kept_back=kept_back))


def _lookahead(
    parts: EagerParts,
    tables: DeviceTables,
    region: ControlRegion,
    *,
    active: torch.Tensor,
    room: tuple[int, int],
) -> CapturedLookahead:
    """`room`: experts of a layer that are wanted, and slots that are kept back."""
    from hetero_gpu.predict.lookahead import DeviceLookahead

    first, eviction = parts.lookahead[0], parts.orchestrator.eviction
    per_layer, kept_back = room
    return CapturedLookahead(
        DeviceLookahead(first.weights, first.shape, active=active),
        tables=tables,
        region=region,
        per_layer=per_layer,
        kept_back=kept_back,
        eviction=eviction if isinstance(eviction, Lookahead) else None,
    )


def _listen_rolling(
    parts: EagerParts, prompts: RollingPrompts, compressor: Compressor | None, _sequences: GraphSequences
) -> None:
    listen_to_routers(parts.model, prompts.hear)
    if prompts.sees:
        prompts.look_through(make_sight(parts.model, compressor))


def _foresight(
    parts: EagerParts,
    tables: DeviceTables,
    region: ControlRegion,
    *,
    active: torch.Tensor,
    room: tuple[int, int],
) -> CapturedForesight:
    """`room`: as for `_lookahead`."""
    from hetero_gpu.predict import DevicePredictor

    predictor = DevicePredictor(parts.predictors[0].models, active)
    predictor.attach(region)
    num_layers, num_experts = parts.store.num_layers, parts.store.num_experts
    sizes = [parts.cache.pool_size(layer) for layer in range(num_layers)]
    per_layer, kept_back = room
    return CapturedForesight(
        predictor,
        active=active,
        tables=tables,
        region=region,
        per_layer=min(per_layer, num_experts),
        room=Room(kept_back=kept_back, is_shared=min(sizes) == parts.slabs.num_slabs),
    )


def _listen_foreseeing(
    parts: EagerParts, prompts: Prompts, foresight: CapturedForesight, sequences: GraphSequences
) -> None:
    """Forecasts are made anew inside the captured step, as near as the configuration says."""
    listen_to_routers(parts.model, prompts.hear)
    if parts.refined is not None:
        early = EarlyRouters(parts.model) if parts.refined.asks_early else None
        foresight.follow(Nearer(parts.refined.refinement, sequences.tokens, early))
