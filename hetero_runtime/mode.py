"""How texts run: a step captured as one graph, where that is asked for and possible; else eagerly.

Whoever decides besides the routers listens from here on.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from hetero_gpu import SlabCache, SlabPool
from hetero_runtime.config import ResolvedConfig
from hetero_runtime.config.tree import ResolvedMemory
from hetero_runtime.experts.base import ExpertStore
from hetero_runtime.foresight import ForeseenSequences, Foresight
from hetero_runtime.foresight.build import extra_in_graph
from hetero_runtime.foresight.sight import make_sight
from hetero_runtime.hf.forward import EagerSequences, Sequences
from hetero_runtime.hf.hooks import attach
from hetero_runtime.hf.router_choice import let_choose
from hetero_runtime.hf.router_hooks import listen_to_routers
from hetero_runtime.in_place import InPlaceMisses
from hetero_runtime.minds import Minds
from hetero_runtime.orchestrator import Orchestrator
from hetero_runtime.orchestrator.eager import EagerOrchestrator
from hetero_runtime.plan.demand import drafted_tokens
from hetero_runtime.routing import RoutedSequences
from hetero_runtime.speculation import checked_sequences
from hetero_runtime.vision import CompressedSequences

if TYPE_CHECKING:
    from hetero_scheduler.predict.lookahead_mlp import LookaheadMlp
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
    memory: ResolvedMemory
    orchestrator: EagerOrchestrator
    dtype: torch.dtype
    predictors: Sequence[Mamba2Predictor] = ()
    """For each row one that the captured step can take over from."""
    lookahead: Sequence[LookaheadMlp] = ()
    """The same, where they look ahead within a pass."""
    refined: Refined | None = None
    """Who makes their forecasts anew, in the captured step too."""
    in_place: InPlaceMisses | None = None
    """Who computes misses on the CPU; None where all are loaded."""


def choose_mode(
    config: ResolvedConfig, parts: EagerParts, minds: Minds, *, foresight: Foresight | None
) -> tuple[Orchestrator, Sequences]:
    """Hook the eager orchestrator into the model; then, for `execution.mode: graph`, try to capture."""
    run_layer, compressor = parts.orchestrator.run_layer, minds.compressor
    attach(parts.experts, run_layer if compressor is None else compressor.listening(run_layer))
    if config.execution.mode == "graph":
        from hetero_runtime.graph import NotCapturableError, Places, capture

        places = Places(config.execution.max_rows, config.execution.max_length, drafted_tokens(config))
        try:
            return capture(
                parts,
                places,
                prefetch_extra=extra_in_graph(config),
                routing=minds.routing,
                copies_insertions=config.prefetch.schedule == "bounded",
                compressor=compressor,
            )
        except NotCapturableError as reason:
            log.warning("decoding stays eager: %s", reason)
    return parts.orchestrator, _eager_sequences(parts.model, minds, foresight)


def _eager_sequences(model: Any, minds: Minds, foresight: Foresight | None) -> Sequences:
    """Transformers' own passes, with everybody around them who takes part."""
    if minds.speculation is not None:
        return checked_sequences(model, minds.speculation.blocks)
    sequences: Sequences = EagerSequences(model)
    if minds.compressor is not None:
        sequences = CompressedSequences(sequences, minds.compressor)
    if minds.routing is not None:
        let_choose(model, minds.routing.choose, looks_ahead=minds.routing.policy.looks_ahead)
        sequences = RoutedSequences(sequences, minds.routing)
    if foresight is not None:
        listen_to_routers(model, foresight.hear)
        if foresight.sees:
            foresight.look_through(make_sight(model, minds.compressor))
        sequences = ForeseenSequences(sequences, foresight)
    return sequences
