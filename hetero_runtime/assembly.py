"""From a resolved configuration to the parts of a running engine.

checkpoint ─► skeleton (meta) ─┬─► backbone ──────────────► device
                               └─► expert store ═supply═► slab cache ◄─ orchestrator
                                   host bank, file, swap
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from hetero_gpu import SlabCache, SlabPool
from hetero_runtime.calibration.profile import profiled_popularity
from hetero_runtime.checkpoint import Checkpoint
from hetero_runtime.config import ResolvedConfig
from hetero_runtime.experts.base import ExpertStore
from hetero_runtime.experts.store import Progress
from hetero_runtime.foresight import ForeseenSequences, Foresight
from hetero_runtime.foresight.build import (
    Listening,
    extra_in_graph,
    followed_in_graph,
    make_foresight,
    make_predictors,
    make_row_eviction,
    refined_in_graph,
    router_shape,
)
from hetero_runtime.foresight.link import Link
from hetero_runtime.foresight.sight import make_sight
from hetero_runtime.hf.architectures import Architecture
from hetero_runtime.hf.conversion import split_checkpoint
from hetero_runtime.hf.forward import EagerSequences, Sequences
from hetero_runtime.hf.hooks import attach, expert_mlp
from hetero_runtime.hf.loading import Skeleton, build_skeleton, load_backbone
from hetero_runtime.hf.router_choice import let_choose
from hetero_runtime.hf.router_hooks import listen_to_routers, router_top_k
from hetero_runtime.hf.tokens import eos_token_ids, load_tokenizer
from hetero_runtime.in_place import InPlaceMisses
from hetero_runtime.in_place.build import Routed, check_in_place, make_in_place, splits_by_cost
from hetero_runtime.no_room import no_room_for
from hetero_runtime.orchestrator import Orchestrator
from hetero_runtime.orchestrator.ahead import Ahead
from hetero_runtime.orchestrator.eager import EagerOrchestrator
from hetero_runtime.orchestrator.prompt_ahead import PromptAhead
from hetero_runtime.plan.demand import drafted_tokens
from hetero_runtime.routing import CopiesAhead, CountsRouting, RoutedSequences, Routing
from hetero_runtime.routing.build import make_routing
from hetero_runtime.speculation import Speculation, checked_sequences, make_speculation
from hetero_runtime.tiers.elastic import make_governor
from hetero_runtime.tiers.opening import open_store
from hetero_runtime.tiers.supply import Supply, make_slabs, make_supply
from hetero_runtime.vision import CompressedSequences, CompressionStats, Compressor
from hetero_runtime.vision.build import make_compressor
from hetero_scheduler import EvictionPolicy, ExpertKey, SlotMachine
from hetero_scheduler.predict import Predictor

if TYPE_CHECKING:
    from hetero_scheduler.predict.mamba2 import Mamba2Predictor
    from hetero_scheduler.predict.refined import Refined

log = logging.getLogger(__name__)


class EagerParts(NamedTuple):
    """What an engine has before its decode step is captured."""

    model: Any
    experts: list[Any]
    store: ExpertStore
    slabs: SlabPool
    cache: SlabCache
    orchestrator: EagerOrchestrator
    dtype: torch.dtype
    predictors: Sequence[Mamba2Predictor] = ()
    """For each row one that the captured step can take over from."""
    refined: Refined | None = None
    """Who makes their forecasts anew, in the captured step too."""
    in_place: InPlaceMisses | None = None
    """Who computes misses on the CPU; None where all are loaded."""


class Tiers(NamedTuple):
    """Where experts live, the slabs that computation reads, and what moves them there.

    `link`: how long that takes; None where nobody asks.
    """

    store: ExpertStore
    slabs: SlabPool
    supply: Supply
    link: Link | None
    cache: SlabCache
    eviction: EvictionPolicy


class _Driven(NamedTuple):
    """Who drives the slab cache, and by which forecasts, where there are any."""

    orchestrator: EagerOrchestrator
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
    predictors = make_predictors(config, skeleton.model)
    speculation = make_speculation(config, tokenizer, skeleton.model, skeleton.architecture)
    routing = make_routing(config, skeleton.model, skeleton.architecture)
    compressor = make_compressor(config, skeleton.model)
    split = split_checkpoint(skeleton.model, checkpoint, skeleton.quantizer)
    routed = Routed(list(skeleton.experts.values()), skeleton.dtype)
    check_in_place(config, routed, split.experts)
    with no_room_for("the weights that are no routed experts", device, fix="take a device with more memory"):
        load_backbone(skeleton, split.backbone, path=checkpoint.path, device=device)
    with ExitStack() as undo:
        store = store or open_store(config, checkpoint, modules=split.experts, progress=progress)
        undo.callback(store.close)
        eviction = _make_eviction(config, store, routing)
        is_timed = bool(predictors) or splits_by_cost(config)
        tiers = _make_tiers(config, store, device, eviction=eviction, is_timed=is_timed, undo=undo)
        in_place = make_in_place(config, routed, store, cache=tiers.cache, eviction=eviction, link=tiers.link)
        if in_place is not None:
            undo.callback(in_place.close)
        driven = _make_orchestrator(
            config, skeleton, tiers, predictors=predictors, routing=routing, in_place=in_place
        )
        orchestrator, sequences = _choose_mode(
            config,
            EagerParts(
                model=skeleton.model,
                experts=routed.modules,
                store=store,
                slabs=tiers.slabs,
                cache=tiers.cache,
                orchestrator=driven.orchestrator,
                dtype=skeleton.dtype,
                predictors=followed_in_graph(config, predictors),
                refined=refined_in_graph(config, predictors),
                in_place=in_place,
            ),
            foresight=driven.foresight,
            routing=routing,
            speculation=speculation,
            compressor=compressor,
        )
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
        orchestrator=orchestrator,
        sequences=sequences,
        foresight=driven.foresight,
        speculation=speculation,
        routing=routing,
        compressor=compressor,
    )


def _choose_mode(
    config: ResolvedConfig,
    parts: EagerParts,
    *,
    foresight: Foresight | None,
    routing: Routing | None,
    speculation: Speculation | None,
    compressor: Compressor | None,
) -> tuple[Orchestrator, Sequences]:
    """Hook the eager orchestrator into the model; then, for `execution.mode: graph`, try to capture."""
    run_layer = parts.orchestrator.run_layer
    attach(parts.experts, run_layer if compressor is None else compressor.listening(run_layer))
    if config.execution.mode == "graph":
        from hetero_runtime.graph import NotCapturableError, Places, capture

        places = Places(config.execution.max_rows, config.execution.max_length, drafted_tokens(config))
        try:
            return capture(
                parts,
                places,
                prefetch_extra=extra_in_graph(config),
                routing=routing,
                copies_insertions=config.prefetch.schedule == "bounded",
            )
        except NotCapturableError as reason:
            log.warning("decoding stays eager: %s", reason)
    if speculation is not None:
        return parts.orchestrator, checked_sequences(parts.model, speculation.blocks)
    sequences: Sequences = EagerSequences(parts.model)
    if compressor is not None:
        sequences = CompressedSequences(sequences, compressor)
    if routing is not None:
        let_choose(parts.model, routing.choose, looks_ahead=routing.policy.looks_ahead)
        sequences = RoutedSequences(sequences, routing)
    if foresight is not None:
        listen_to_routers(parts.model, foresight.hear)
        if foresight.sees:
            foresight.look_through(make_sight(parts.model, compressor))
        sequences = ForeseenSequences(sequences, foresight)
    return parts.orchestrator, sequences


def _make_tiers(
    config: ResolvedConfig,
    store: ExpertStore,
    device: torch.device,
    *,
    eviction: EvictionPolicy,
    is_timed: bool,
    undo: ExitStack,
) -> Tiers:
    """Slabs, what fills them, and the cache, the pinned prefix in it. `is_timed`: somebody asks the link."""
    slabs = make_slabs(config, store, num_slabs=sum(_layer_slots(config, store)), device=device)
    undo.callback(slabs.close)
    supply = make_supply(config, store, slabs, eviction=eviction)
    undo.callback(supply.close)
    link = supply.link() if is_timed else None
    per_layer = _layer_slots(config, store) if config.memory.pool == "per_layer" else None
    num_layers, num_experts = store.num_layers, store.num_experts
    cache = SlabCache(
        slabs=slabs,
        machine=SlotMachine(
            slabs.num_slabs, num_layers=num_layers, num_experts=num_experts, layer_slots=per_layer
        ),
        eviction=eviction,
        copier=supply.copier,
        record=supply.record,
    )
    for layer in range(num_layers if config.slabs_are_bank else config.memory.pinned_prefix):
        for expert in range(num_experts):
            cache.pin(ExpertKey(layer, expert))
    return Tiers(store, slabs, supply, link, cache, eviction)


def _make_orchestrator(
    config: ResolvedConfig,
    skeleton: Skeleton,
    tiers: Tiers,
    *,
    predictors: list[Predictor],
    routing: Routing | None,
    in_place: InPlaceMisses | None,
) -> _Driven:
    foresight, top_k = None, router_top_k(skeleton.model)
    if predictors and tiers.link is not None:
        foresight = make_foresight(
            config,
            Listening(skeleton.model, predictors, router_shape(skeleton.model)),
            cache=tiers.cache,
            eviction=tiers.eviction,
            link=tiers.link,
        )
    ahead: Ahead | None = foresight
    is_prefetching = foresight is not None and foresight.is_prefetching
    if routing is not None and config.prefetch.schedule == "bounded":
        ahead, is_prefetching = CopiesAhead(tiers.cache, routing, in_flight=config.prefetch.in_flight), True
    fetches_popular = _follows_popularity(config, foresight, is_prefetching=is_prefetching)
    num_layers, num_experts = tiers.eviction.score.shape
    popularity = profiled_popularity(
        config.prefetch, num_layers=num_layers, num_experts=num_experts, top_k=top_k
    )
    orchestrator = EagerOrchestrator(
        tiers.cache,
        mlps=[expert_mlp(module) for module in skeleton.experts.values()],
        materialize=partial(tiers.store.materialize, dtype=skeleton.dtype),
        eviction=tiers.eviction,
        prompts=PromptAhead(tiers.cache, popularity, top_k=top_k) if fetches_popular else None,
        ahead=ahead,
        governor=make_governor(config, tiers.supply, tiers.slabs, tiers.cache, top_k=top_k),
        in_place=in_place,
    )
    return _Driven(orchestrator, foresight)


def _follows_popularity(config: ResolvedConfig, foresight: Foresight | None, *, is_prefetching: bool) -> bool:
    """Whether prompts fetch popular experts ahead: unless it is foreseen which ones they need."""
    is_foreseen = foresight is not None and foresight.orders_prompts
    return config.prefetch.schedule == "popularity" or (is_prefetching and not is_foreseen)


def _make_eviction(config: ResolvedConfig, store: ExpertStore, routing: Routing | None) -> EvictionPolicy:
    if config.eviction.policy == "logical":
        assert routing is not None, "the configuration has no logical cache to follow"
        return routing.eviction
    return make_row_eviction(config, num_layers=store.num_layers, num_experts=store.num_experts)


def _layer_slots(config: ResolvedConfig, store: ExpertStore) -> list[int]:
    """Slots by layer: all experts of the pinned prefix, the slabs spread evenly over the rest."""
    num_pinned = config.memory.pinned_prefix
    num_rest = store.num_layers - num_pinned
    share, extra = divmod(config.memory.slabs, num_rest) if num_rest else (0, 0)
    return [store.num_experts] * num_pinned + [share + (i < extra) for i in range(num_rest)]
