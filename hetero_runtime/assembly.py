"""From a resolved configuration to the parts of a running engine.

checkpoint ─► skeleton (meta) ─┬─► backbone ──────────────► device
                               └─► expert store (host bank) ═copies═► slab cache ◄─ orchestrator
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from hetero_gpu import Copier, SlabCache, SlabPool, make_copier
from hetero_runtime.checkpoint import Checkpoint
from hetero_runtime.config import ResolvedConfig
from hetero_runtime.experts.store import ExpertStore, Progress, load_store
from hetero_runtime.foresight import ForeseenSequences, Foresight
from hetero_runtime.foresight.build import make_foresight, make_predictors, make_row_eviction, router_shape
from hetero_runtime.foresight.link import measure_link
from hetero_runtime.hf.architectures import Architecture
from hetero_runtime.hf.conversion import split_checkpoint
from hetero_runtime.hf.forward import EagerSequences, Sequences
from hetero_runtime.hf.hooks import attach, expert_mlp
from hetero_runtime.hf.loading import Skeleton, build_skeleton, load_backbone
from hetero_runtime.hf.router_choice import let_choose
from hetero_runtime.hf.router_hooks import listen_to_routers
from hetero_runtime.hf.tokens import eos_token_ids, load_tokenizer
from hetero_runtime.no_room import no_room_for
from hetero_runtime.orchestrator import Orchestrator
from hetero_runtime.orchestrator.ahead import Ahead
from hetero_runtime.orchestrator.eager import EagerOrchestrator
from hetero_runtime.routing import CopiesAhead, CountsRouting, RoutedSequences, Routing
from hetero_runtime.routing.build import make_routing
from hetero_runtime.speculation import Speculation, checked_sequences, make_speculation
from hetero_scheduler import EvictionPolicy, ExpertKey, SlotMachine
from hetero_scheduler.predict import Predictor

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


class _Driven(NamedTuple):
    """The slab cache, who drives it, and by which forecasts, where there are any."""

    cache: SlabCache
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
    orchestrator: Orchestrator
    sequences: Sequences
    foresight: Foresight | None
    speculation: Speculation | None
    routing: Routing | None

    @property
    def steered(self) -> CountsRouting | None:
        """Who decides what routers select, where it is not they."""
        return self.routing if self.speculation is None else self.speculation.blocks

    def close(self) -> None:
        """Wait for copies, then free the host bank, the slabs and the weights, whoever still holds a part."""
        self.cache.close()
        self.sequences.close()
        if self.speculation is not None:
            self.speculation.drafter.close()
        self.orchestrator.close()
        self.store.close()
        self.slabs.memory = self.slabs.memory.new_empty((0, self.slabs.record_bytes))
        self.model.to("meta")


def assemble(config: ResolvedConfig, *, progress: Progress | None = None) -> Parts:
    """Load the model that `config` names. On any error nothing stays allocated."""
    device = torch.device(config.device)
    checkpoint = Checkpoint.open(config.model.path)
    skeleton = build_skeleton(checkpoint, dtype=config.model.dtype, device=device)
    tokenizer = load_tokenizer(checkpoint.path)
    end_ids = eos_token_ids(checkpoint.path, checkpoint.config, tokenizer)
    predictors = make_predictors(config, skeleton.model)
    speculation = make_speculation(config, tokenizer, skeleton.model, skeleton.architecture)
    routing = make_routing(config, skeleton.model, skeleton.architecture)
    split = split_checkpoint(skeleton.model, checkpoint, skeleton.quantizer)
    with no_room_for("the weights that are no routed experts", device, fix="take a device with more memory"):
        load_backbone(skeleton, split.backbone, path=checkpoint.path, device=device)
    store = load_store(
        split.experts,
        threads=config.cpu.threads,
        progress=progress,
        is_packed=config.memory.packed,
        experts=config.model.experts,
    )
    try:
        slabs = _make_slabs(sum(_layer_slots(config, store)), store.layout.record_bytes, device)
        driven = _make_orchestrator(
            config, skeleton, store, slabs=slabs, predictors=predictors, routing=routing
        )
        orchestrator, sequences = _choose_mode(
            config,
            EagerParts(
                model=skeleton.model,
                experts=list(skeleton.experts.values()),
                store=store,
                slabs=slabs,
                cache=driven.cache,
                orchestrator=driven.orchestrator,
                dtype=skeleton.dtype,
            ),
            foresight=driven.foresight,
            routing=routing,
            speculation=speculation,
        )
    except BaseException:
        store.close()
        raise
    return Parts(
        config=config,
        device=device,
        architecture=skeleton.architecture,
        model=skeleton.model,
        tokenizer=tokenizer,
        eos_token_ids=end_ids,
        store=store,
        slabs=slabs,
        cache=driven.cache,
        orchestrator=orchestrator,
        sequences=sequences,
        foresight=driven.foresight,
        speculation=speculation,
        routing=routing,
    )


def _choose_mode(
    config: ResolvedConfig,
    parts: EagerParts,
    *,
    foresight: Foresight | None,
    routing: Routing | None,
    speculation: Speculation | None,
) -> tuple[Orchestrator, Sequences]:
    """Hook the eager orchestrator into the model; then, for `execution.mode: graph`, try to capture."""
    attach(parts.experts, parts.orchestrator.run_layer)
    if config.execution.mode == "graph":
        from hetero_runtime.graph import NotCapturableError, capture

        try:
            return capture(
                parts,
                rows=config.execution.max_rows,
                max_length=config.execution.max_length,
                prefetch_extra=config.prefetch.extra if config.prediction.predictor == "pregate" else None,
            )
        except NotCapturableError as reason:
            log.warning("decoding stays eager: %s", reason)
    if speculation is not None:
        return parts.orchestrator, checked_sequences(parts.model, speculation.blocks)
    sequences: Sequences = EagerSequences(parts.model)
    if routing is not None:
        let_choose(parts.model, routing.choose, looks_ahead=routing.policy.looks_ahead)
        sequences = RoutedSequences(sequences, routing)
    if foresight is not None:
        listen_to_routers(parts.model, foresight.hear)
        sequences = ForeseenSequences(sequences, foresight)
    return parts.orchestrator, sequences


def _make_slabs(num_slabs: int, record_bytes: int, device: torch.device) -> SlabPool:
    what = f"{num_slabs} slabs of {record_bytes / 1e6:.1f} MB ({num_slabs * record_bytes / 1e9:.2f} GB)"
    with no_room_for(what, device, fix="lower memory.slabs (or memory.residency), or memory.pinned_prefix"):
        return SlabPool(num_slabs, record_bytes, device)


def _make_orchestrator(
    config: ResolvedConfig,
    skeleton: Skeleton,
    store: ExpertStore,
    *,
    slabs: SlabPool,
    predictors: list[Predictor],
    routing: Routing | None,
) -> _Driven:
    eviction = _make_eviction(config, store, routing)
    copier, foresight = _make_copier(store, slabs.memory.device), None
    link = measure_link(copier, store.record(ExpertKey(0, 0)), slabs.slab(0)) if predictors else None
    cache = _make_cache(config, store, slabs, eviction=eviction, copier=copier)
    if link is not None:
        shape = router_shape(skeleton.model)
        foresight = make_foresight(config, predictors, shape=shape, cache=cache, eviction=eviction, link=link)
    ahead: Ahead | None = foresight
    is_prefetching = foresight is not None and foresight.is_prefetching
    if routing is not None and config.prefetch.schedule == "bounded":
        ahead, is_prefetching = CopiesAhead(cache, routing, in_flight=config.prefetch.in_flight), True
    orchestrator = EagerOrchestrator(
        cache,
        mlps=[expert_mlp(module) for module in skeleton.experts.values()],
        materialize=partial(store.materialize, dtype=skeleton.dtype),
        eviction=eviction,
        is_fetching_ahead=is_prefetching or config.prefetch.schedule == "popularity",
        ahead=ahead,
    )
    return _Driven(cache, orchestrator, foresight)


def _make_eviction(config: ResolvedConfig, store: ExpertStore, routing: Routing | None) -> EvictionPolicy:
    if config.eviction.policy == "logical":
        assert routing is not None, "the configuration has no logical cache to follow"
        return routing.eviction
    return make_row_eviction(config, num_layers=store.num_layers, num_experts=store.num_experts)


def _make_cache(
    config: ResolvedConfig,
    store: ExpertStore,
    slabs: SlabPool,
    *,
    eviction: EvictionPolicy,
    copier: Copier,
) -> SlabCache:
    """The cache, the pinned prefix in it."""
    per_layer = _layer_slots(config, store) if config.memory.pool == "per_layer" else None
    num_layers, num_experts = store.num_layers, store.num_experts
    cache = SlabCache(
        slabs=slabs,
        machine=SlotMachine(
            slabs.num_slabs, num_layers=num_layers, num_experts=num_experts, layer_slots=per_layer
        ),
        eviction=eviction,
        copier=copier,
        record=store.record,
    )
    for layer in range(config.memory.pinned_prefix):
        for expert in range(num_experts):
            cache.pin(ExpertKey(layer, expert))
    return cache


def _make_copier(store: ExpertStore, device: torch.device) -> Copier:
    registration = store.register()
    with no_room_for("copies on their way", device, fix="lower memory.slabs, or memory.pinned_prefix"):
        return make_copier(
            device, registration=registration, record_bytes=store.stored_bytes, packing=store.packing
        )


def _layer_slots(config: ResolvedConfig, store: ExpertStore) -> list[int]:
    """Slots by layer: all experts of the pinned prefix, the slabs spread evenly over the rest."""
    num_pinned = config.memory.pinned_prefix
    num_rest = store.num_layers - num_pinned
    share, extra = divmod(config.memory.slabs, num_rest) if num_rest else (0, 0)
    return [store.num_experts] * num_pinned + [share + (i < extra) for i in range(num_rest)]
