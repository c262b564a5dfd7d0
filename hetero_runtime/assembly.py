"""From a resolved configuration to the parts of a running engine.

checkpoint ─► skeleton (meta) ─┬─► backbone ──────────────► device
                               └─► expert store ═supply═► slab cache ◄─ orchestrator
                                   host bank, file, swap
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from hetero_gpu import SlabCache, SlabPool
from hetero_runtime.calibration.profile import profiled_popularity
from hetero_runtime.checkpoint import Checkpoint
from hetero_runtime.config import ResolvedConfig
from hetero_runtime.experts.base import ExpertStore
from hetero_runtime.experts.store import Progress
from hetero_runtime.foresight import Foresight
from hetero_runtime.foresight.build import (
    Listening,
    followed_in_graph,
    make_foresight,
    make_row_eviction,
    refined_in_graph,
    rolling_in_graph,
    router_shape,
)
from hetero_runtime.hf.architectures import Architecture
from hetero_runtime.hf.conversion import split_checkpoint
from hetero_runtime.hf.forward import Sequences
from hetero_runtime.hf.hooks import expert_mlp
from hetero_runtime.hf.loading import Skeleton, build_skeleton, load_backbone
from hetero_runtime.hf.router_hooks import router_top_k
from hetero_runtime.hf.tokens import eos_token_ids, load_tokenizer
from hetero_runtime.in_place import InPlaceMisses
from hetero_runtime.in_place.build import Routed, check_in_place, make_in_place, splits_by_cost
from hetero_runtime.minds import Minds, make_minds
from hetero_runtime.mode import EagerParts, choose_mode
from hetero_runtime.no_room import no_room_for
from hetero_runtime.orchestrator import Orchestrator
from hetero_runtime.orchestrator.ahead import Ahead
from hetero_runtime.orchestrator.eager import EagerOrchestrator
from hetero_runtime.orchestrator.prompt_ahead import PromptAhead
from hetero_runtime.routing import CopiesAhead, CountsRouting, Routing
from hetero_runtime.speculation import Speculation
from hetero_runtime.tiers.elastic import make_governor
from hetero_runtime.tiers.opening import open_store
from hetero_runtime.tiers.stack import Tiers, make_tiers
from hetero_runtime.tiers.supply import Supply
from hetero_runtime.vision import CompressionStats, Compressor
from hetero_scheduler import EvictionPolicy
from hetero_scheduler.predict import Predictor


class _Running(NamedTuple):
    """Who drives the slab cache, how texts run, and by which forecasts, where there are any."""

    orchestrator: Orchestrator
    sequences: Sequences
    foresight: Foresight | None


@dataclass
class Parts:
    """What an engine is made of. `close` gives everything back."""

    config: ResolvedConfig
    device: torch.device
    architecture: Architecture
    model: Any
    tokenizer: Any
    eos_token_ids: frozenset[int]
    store: ExpertStore
    slabs: SlabPool
    cache: SlabCache
    supply: Supply
    orchestrator: Orchestrator
    sequences: Sequences
    foresight: Foresight | None
    speculation: Speculation | None
    routing: Routing | None
    compressor: Compressor | None

    @property
    def steered(self) -> CountsRouting | None:
        """Who decides what routers select, where it is not they."""
        return self.routing if self.speculation is None else self.speculation.blocks

    def compression_stats(self) -> CompressionStats:
        """Of prompts with images; zeros where all their tokens are kept."""
        return CompressionStats() if self.compressor is None else self.compressor.stats()

    def close(self) -> None:
        """Wait for copies, then free experts, slabs and weights, whoever still holds a part."""
        self.release().close()

    def release(self) -> ExpertStore:
        """As `close`, but for the experts, which may serve other parts of this model."""
        self.cache.close()
        self.sequences.close()
        if self.speculation is not None:
            self.speculation.drafter.close()
        self.orchestrator.close()
        self.supply.close()
        self.slabs.close()
        self.model.to("meta")
        return self.store


def assemble(
    config: ResolvedConfig, *, progress: Progress | None = None, store: ExpertStore | None = None
) -> Parts:
    """Load the model that `config` names. On any error nothing stays allocated.

    `store`: its experts, if earlier parts have released them; they are these parts' from now on, whatever
    happens.
    """
    with ExitStack() as undo:
        if store is not None:
            undo.callback(store.close)
        parts = _assemble(config, progress, store)
        undo.pop_all()
    return parts


def _assemble(config: ResolvedConfig, progress: Progress | None, store: ExpertStore | None) -> Parts:
    device = torch.device(config.torch_device)
    checkpoint = Checkpoint.open(config.model.path)
    skeleton = build_skeleton(checkpoint, dtype=config.model.dtype, device=device)
    tokenizer = load_tokenizer(checkpoint.path)
    end_ids = eos_token_ids(checkpoint.path, checkpoint.config, tokenizer)
    minds = make_minds(config, skeleton, tokenizer)
    split = split_checkpoint(skeleton.model, checkpoint, skeleton.quantizer)
    routed = Routed(list(skeleton.experts.values()), skeleton.dtype)
    check_in_place(config, routed, split.experts)
    with no_room_for("the weights that are no routed experts", device, fix="take a device with more memory"):
        load_backbone(skeleton, split.backbone, path=checkpoint.path, device=device)
    with ExitStack() as undo:
        store = store or open_store(config, checkpoint, modules=split.experts, progress=progress)
        undo.callback(store.close)
        eviction = _make_eviction(config, store, minds.routing)
        is_timed = bool(minds.predictors) or splits_by_cost(config)
        tiers = make_tiers(config, store, device, eviction=eviction, is_timed=is_timed, undo=undo)
        in_place = make_in_place(config, routed, store, cache=tiers.cache, eviction=eviction, link=tiers.link)
        if in_place is not None:
            undo.callback(in_place.close)
        running = _run(config, skeleton, tiers, minds=minds, in_place=in_place)
        undo.pop_all()
    return Parts(
        config=config,
        device=device,
        architecture=skeleton.architecture,
        model=skeleton.model,
        tokenizer=tokenizer,
        eos_token_ids=end_ids,
        store=store,
        slabs=tiers.slabs,
        cache=tiers.cache,
        supply=tiers.supply,
        orchestrator=running.orchestrator,
        sequences=running.sequences,
        foresight=running.foresight,
        speculation=minds.speculation,
        routing=minds.routing,
        compressor=minds.compressor,
    )


def _run(
    config: ResolvedConfig, skeleton: Skeleton, tiers: Tiers, *, minds: Minds, in_place: InPlaceMisses | None
) -> _Running:
    """Put the orchestrator of `config` in charge of the model's experts."""
    foresight = _make_foresight(config, skeleton, tiers, minds.predictors)
    parts = EagerParts(
        model=skeleton.model,
        experts=list(skeleton.experts.values()),
        store=tiers.store,
        slabs=tiers.slabs,
        cache=tiers.cache,
        memory=config.memory,
        orchestrator=_make_orchestrator(
            config, skeleton, tiers, foresight=foresight, routing=minds.routing, in_place=in_place
        ),
        dtype=skeleton.dtype,
        predictors=followed_in_graph(config, minds.predictors),
        lookahead=rolling_in_graph(config, minds.predictors),
        refined=refined_in_graph(config, minds.predictors),
        in_place=in_place,
    )
    return _Running(*choose_mode(config, parts, minds, foresight=foresight), foresight)


def _make_foresight(
    config: ResolvedConfig, skeleton: Skeleton, tiers: Tiers, predictors: list[Predictor]
) -> Foresight | None:
    if not predictors or tiers.link is None:
        return None
    return make_foresight(
        config,
        Listening(skeleton.model, predictors, router_shape(skeleton.model)),
        cache=tiers.cache,
        eviction=tiers.eviction,
        link=tiers.link,
    )


def _make_orchestrator(
    config: ResolvedConfig,
    skeleton: Skeleton,
    tiers: Tiers,
    *,
    foresight: Foresight | None,
    routing: Routing | None,
    in_place: InPlaceMisses | None,
) -> EagerOrchestrator:
    top_k = router_top_k(skeleton.model)
    ahead: Ahead | None = foresight
    is_prefetching = foresight is not None and foresight.is_prefetching
    if routing is not None and config.prefetch.schedule == "bounded":
        ahead, is_prefetching = CopiesAhead(tiers.cache, routing, in_flight=config.prefetch.in_flight), True
    fetches_popular = _follows_popularity(config, foresight, is_prefetching=is_prefetching)
    num_layers, num_experts = tiers.eviction.score.shape
    popularity = profiled_popularity(
        config.prefetch, num_layers=num_layers, num_experts=num_experts, top_k=top_k
    )
    return EagerOrchestrator(
        tiers.cache,
        mlps=[expert_mlp(module) for module in skeleton.experts.values()],
        materialize=partial(tiers.store.materialize, dtype=skeleton.dtype),
        eviction=tiers.eviction,
        prompts=PromptAhead(tiers.cache, popularity, top_k=top_k) if fetches_popular else None,
        ahead=ahead,
        governor=make_governor(config, tiers.supply, tiers.slabs, tiers.cache, top_k=top_k),
        in_place=in_place,
    )


def _follows_popularity(config: ResolvedConfig, foresight: Foresight | None, *, is_prefetching: bool) -> bool:
    """Whether prompts fetch popular experts ahead: unless it is foreseen which ones they need."""
    is_foreseen = foresight is not None and foresight.orders_prompts
    return config.prefetch.schedule == "popularity" or (is_prefetching and not is_foreseen)


def _make_eviction(config: ResolvedConfig, store: ExpertStore, routing: Routing | None) -> EvictionPolicy:
    if config.eviction.policy == "logical":
        assert routing is not None, "the configuration has no logical cache to follow"
        return routing.eviction
    return make_row_eviction(config, num_layers=store.num_layers, num_experts=store.num_experts)
