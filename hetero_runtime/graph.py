"""Turn an eager engine into one whose decode step is a CUDA graph, where model and machine allow it.

What does not allow it is no error: decoding stays eager, and the reason is logged once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from hetero_gpu.control import ControlRegion, CopyEngine
from hetero_gpu.experts.decode import MOST_TOKENS, DecodeExperts
from hetero_gpu.experts.layout import ExpertFormat
from hetero_gpu.experts.prefill import GroupedExperts
from hetero_gpu.tables import DeviceTables, MappedBank
from hetero_runtime.experts.kernel_format import UnreadableError, expert_format
from hetero_runtime.experts.store import BankStore
from hetero_runtime.graph_ahead import Ahead, look_ahead
from hetero_runtime.hf.attention import layer_kinds, why_not_capturable
from hetero_runtime.hf.check_graphs import CheckGraphs
from hetero_runtime.hf.fused_attention import fuse_attention
from hetero_runtime.hf.graph_sequences import GraphSequences
from hetero_runtime.hf.hooks import attach
from hetero_runtime.hf.router_hooks import router_top_k
from hetero_runtime.hf.small_choice import small_choosers
from hetero_runtime.hf.small_ops import install_small_ops
from hetero_runtime.hf.visual import embed_by_product
from hetero_runtime.orchestrator import Phase
from hetero_runtime.orchestrator.captured_in_place import CapturedInPlace
from hetero_runtime.orchestrator.captured_prefetch import (
    Asker,
    AskOneLayerAhead,
    CapturedPrefetch,
)
from hetero_runtime.orchestrator.device import DeviceOrchestrator
from hetero_runtime.orchestrator.grouped import ForeseesPrompts, GroupedOrchestrator
from hetero_runtime.plan.captured import (
    MOST_OUTSTANDING,
    slabs_of_layers,
    why_drafts_stay,
    why_too_few_slabs,
)
from hetero_runtime.plan.demand import GROUPED_TOKENS
from hetero_runtime.routing import Routing
from hetero_runtime.routing.captured import CapturedRouting
from hetero_runtime.speculation import CheckedSequences
from hetero_runtime.vision import Compressor
from hetero_scheduler import Popularity

if TYPE_CHECKING:
    from hetero_runtime.mode import EagerParts


class NotCapturableError(Exception):
    """Why decoding stays eager. Never leaves `mode`."""


class Places(NamedTuple):
    """`rows` texts of up to `max_length` tokens. A step takes one token of each or, where tokens are drafted,
    up to `num_drafted` of one text and the one before them."""

    rows: int
    max_length: int
    num_drafted: int = 0

    @property
    def step_rows(self) -> int:
        """Rows of a step at most."""
        return self.num_drafted + 1 if self.num_drafted else self.rows


class GraphParts(NamedTuple):
    """What takes the place of the eager orchestrator and sequences."""

    orchestrator: DeviceOrchestrator
    sequences: GraphSequences | CheckedSequences


def capture(
    parts: EagerParts,
    places: Places,
    *,
    prefetch_extra: int | None = None,
    routing: Routing | None = None,
    copies_insertions: bool = False,
    compressor: Compressor | None = None,
) -> GraphParts:
    """Prepare and capture. Raises NotCapturableError with the reason, and then has changed nothing.

    `prefetch_extra`: experts beyond top-k that are worth a prefetch to a layer, by the forecasts of
    `parts.predictors` or, without any, by the next layer's router; None prefetches nothing. `routing`: what
    decides in place of the routers; with `copies_insertions`, what it inserts is prefetched. `compressor`:
    who lets image tokens go.
    """
    device, top_k, rows = parts.slabs.memory.device, router_top_k(parts.model), places.step_rows
    is_prefetching = copies_insertions or prefetch_extra is not None
    spare = MOST_OUTSTANDING if is_prefetching else 0
    _check_capturable(parts, places, top_k=top_k, spare=spare)
    active, form = torch.ones(rows, dtype=torch.bool, device=device), _format(parts)
    bank, tables = _mapped(_bank(parts)), _tables(parts, max_pairs=rows * top_k)
    region = ControlRegion(device, ring_size=MOST_OUTSTANDING)
    tables.attach(region)  # the host reads errors there without waiting
    steered = None if routing is None else _steered(parts, routing, active=active, tables=tables)
    ahead = Ahead()
    if copies_insertions and steered is not None:
        ahead = Ahead(AskOneLayerAhead(steered))
    if prefetch_extra is not None:
        num_wanted = top_k + prefetch_extra
        ahead = look_ahead(parts, tables, region, active=active, num_wanted=num_wanted, compressor=compressor)
    prefetch = None if ahead.asker is None else _prefetch(parts, ahead.asker, bank, tables, region)
    in_place = None if parts.in_place is None else _in_place(parts, tables, region, top_k=top_k)
    orchestrator = DeviceOrchestrator(
        _for_prompts(parts, form, max_tokens=min(places.max_length, GROUPED_TOKENS), foresees=ahead.foresees),
        cache=parts.cache,
        slabs=parts.slabs,
        bank=bank,
        tables=tables,
        experts=DecodeExperts(form, top_k, max_tokens=rows, dtype=parts.dtype, device=device),
        active=active,
        prefetch=prefetch,
        in_place=in_place,
    )
    try:
        run_layer = orchestrator.run_layer
        attach(parts.experts, run_layer if compressor is None else compressor.listening(run_layer))
        if places.num_drafted:
            checks = CheckGraphs(parts.model, active=active, rows=places.rows, max_length=places.max_length)
            _capture(parts, checks, orchestrator)
            return GraphParts(orchestrator, CheckedSequences(checks))
        sequences = GraphSequences(
            parts.model,
            active=active,
            max_length=places.max_length,
            texts=ahead.texts or steered,
            cut=compressor,
        )
        ahead.listen(sequences)
        _capture(parts, sequences, orchestrator, steered=steered)
    except BaseException:
        orchestrator.close()
        raise
    return GraphParts(orchestrator, sequences)


def _capture(
    parts: EagerParts,
    sequences: GraphSequences | CheckGraphs,
    orchestrator: DeviceOrchestrator,
    *,
    steered: CapturedRouting | None = None,
) -> None:
    """Make the model's small operations few launches, then capture."""
    install_small_ops(parts.model, routers=steered is None)
    fuse_attention(parts.model)
    embed_by_product(parts.model)
    if steered is not None:
        assert isinstance(sequences, GraphSequences), "drafts are checked with the routers' own choice"
        steered.attach(parts.model, sequences.tokens, routers=small_choosers(parts.model))
    capture_step(sequences, orchestrator, steered=steered)


def capture_step(
    sequences: GraphSequences | CheckGraphs,
    orchestrator: DeviceOrchestrator,
    *,
    steered: CapturedRouting | None = None,
) -> None:
    """Capture the decode step of `sequences` with the experts function that is attached now."""
    around = partial(orchestrator.pass_, checkpoint=lambda: None)

    @contextmanager
    def decode(way: int = 0) -> Iterator[None]:
        steered_uncounted = nullcontext() if steered is None else steered.uncounted()
        with orchestrator.uncounted(), steered_uncounted, orchestrator.going(way), around(Phase.DECODE):
            yield

    prefill = partial(around, Phase.PREFILL)
    if isinstance(sequences, CheckGraphs):  # forecasts are not for drafts, so there is one way
        sequences.capture(prefill=prefill, decode=decode)
    else:
        sequences.capture(prefill=prefill, decode=decode, ways=orchestrator)


def _steered(
    parts: EagerParts, routing: Routing, *, active: torch.Tensor, tables: DeviceTables
) -> CapturedRouting:
    follows = parts.orchestrator.eviction is routing.eviction
    vocab_size = parts.model.config.get_text_config(decoder=True).vocab_size
    try:
        return CapturedRouting(
            routing, active=active, vocab_size=vocab_size, score=tables.score if follows else None
        )
    except ValueError as error:
        raise NotCapturableError(str(error)) from error


def _check_capturable(parts: EagerParts, places: Places, *, top_k: int, spare: int) -> None:
    rows = places.step_rows
    if parts.slabs.memory.device.type != "cuda":
        raise NotCapturableError("there is no CUDA device")
    if reason := why_not_capturable(parts.model.config):
        raise NotCapturableError(reason)
    if places.num_drafted and (reason := why_drafts_stay(layer_kinds(parts.model.config))):
        raise NotCapturableError(reason)
    if not _bank(parts).is_registered:
        raise NotCapturableError("CUDA did not register the host bank: the device cannot read misses itself")
    if rows > MOST_TOKENS:
        raise NotCapturableError(f"a captured step has at most {MOST_TOKENS} rows, and {rows} were asked for")
    reason = why_too_few_slabs(
        slabs_of_layers(parts.memory, num_layers=parts.store.num_layers),
        parts.memory.pool,
        num_experts=parts.store.num_experts,
        rows=rows,
        top_k=top_k,
        spare=spare,
    )
    if reason is not None:
        raise NotCapturableError(reason)


def _for_prompts(
    parts: EagerParts, form: ExpertFormat, *, max_tokens: int, foresees: ForeseesPrompts | None
) -> GroupedOrchestrator:
    top_k, device = router_top_k(parts.model), parts.slabs.memory.device
    experts = GroupedExperts(form, top_k, max_tokens=max_tokens, dtype=parts.dtype, device=device)
    experts.warm_up(parts.slabs.memory, num_experts=parts.store.num_experts)
    prompts = parts.orchestrator.prompts
    return GroupedOrchestrator(
        parts.cache,
        slabs=parts.slabs,
        experts=experts,
        eviction=parts.orchestrator.eviction,
        popularity=(
            Popularity(parts.store.num_layers, parts.store.num_experts)
            if prompts is None
            else prompts.popularity
        ),
        is_fetching_ahead=prompts is not None or foresees is not None,
        foresees=foresees,
    )


def _format(parts: EagerParts) -> ExpertFormat:
    try:
        return expert_format(parts.store.layout, parts.store.forms, parts.experts[0])
    except UnreadableError as error:
        raise NotCapturableError(str(error)) from error


def _prefetch(
    parts: EagerParts, asker: Asker, bank: MappedBank, tables: DeviceTables, region: ControlRegion
) -> CapturedPrefetch:
    spare_cpus = frozenset[int]() if parts.in_place is None else parts.in_place.experts.spare_cpus
    try:
        return CapturedPrefetch(
            asker,
            tables=tables,
            region=region,
            bank=bank,
            records=_bank(parts).records,
            slabs=parts.slabs,
            engine=CopyEngine.cuda(tables.device),
            cpus=spare_cpus if len(spare_cpus) > 1 else frozenset(),
        )
    except OSError as error:  # no CUDA runtime for the worker to call
        raise NotCapturableError(f"experts cannot be prefetched: {error}") from error


def _in_place(
    parts: EagerParts, tables: DeviceTables, region: ControlRegion, *, top_k: int
) -> CapturedInPlace:
    assert parts.in_place is not None, "nothing is computed in place"
    return CapturedInPlace(
        parts.in_place.experts,
        parts.in_place.policy,
        tables=tables,
        region=region,
        hidden=parts.model.config.get_text_config(decoder=True).hidden_size,
        top_k=top_k,
    )


def _bank(parts: EagerParts) -> BankStore:
    assert isinstance(parts.store, BankStore), "the configuration refuses graph mode for any other"
    return parts.store


def _mapped(store: BankStore) -> MappedBank:
    try:
        return MappedBank.of(store.records, store.stored_bytes, store.packing)
    except RuntimeError as error:
        raise NotCapturableError(str(error)) from error


def _tables(parts: EagerParts, *, max_pairs: int) -> DeviceTables:
    try:
        return DeviceTables(
            num_slots=parts.slabs.num_slabs,
            num_layers=parts.store.num_layers,
            num_experts=parts.store.num_experts,
            max_pairs=max_pairs,
            device=parts.slabs.memory.device,
        )
    except ValueError as error:
        raise NotCapturableError(str(error)) from error
