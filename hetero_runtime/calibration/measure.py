"""Measure a calibration: text through the exact model, its routers listened to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from hetero_runtime.assembly import Parts
from hetero_runtime.calibration.tally import Tally, frequent_tokens
from hetero_runtime.errors import RequestError
from hetero_runtime.evaluation.base import TokenIds, TokensSeen
from hetero_runtime.hf.router_choice import Chooser, RouterScores, let_choose
from hetero_runtime.hf.router_hooks import routed_layers, router_top_k
from hetero_runtime.no_room import no_room_for
from hetero_runtime.orchestrator import Phase
from hetero_scheduler.routing import Calibration, Shape

Rows = Sequence[TokenIds]


class Measured(NamedTuple):
    """`num_tokens`: read in all. `known`: share of them whose token has a prior."""

    calibration: Calibration
    num_tokens: int
    known: float


def measure(parts: Parts, rows: Rows, *, num_priors: int, seen: TokensSeen | None = None) -> Measured:
    """Read `rows`, each as a text of its own, through the model of `parts`; its routers listen from then on.

    `num_priors`: the most frequent tokens of `rows` get a prior each, so many at most. Raises RequestError
    for no rows, CheckpointError for a model whose routers cannot be listened to.
    """
    if not rows:
        raise RequestError("there is no text to calibrate on; give one of a few ten thousand tokens or more")
    tally = Tally(_shape_of(parts), frequent_tokens(rows, num_priors))
    let_choose(parts.model, _listener(tally), looks_ahead=False)
    num_tokens, num_done = sum(map(len, rows)), 0
    for row in rows:
        ids = torch.tensor(row, device=parts.device)
        tally.begin(np.array(row))
        with (
            parts.sequences.open() as sequence,
            parts.orchestrator.pass_(Phase.PREFILL, checkpoint=lambda: None),
            no_room_for(f"a pass over {len(row)} tokens", parts.device, fix="cut windows shorter (--length)"),
        ):
            sequence.extend(ids)
        num_done += len(row)
        if seen is not None:
            seen(num_done, num_tokens)
    return Measured(tally.calibration(), num_tokens, tally.known_share())


def _shape_of(parts: Parts) -> Shape:
    layers = routed_layers(parts.model)
    return Shape(len(layers), layers[0].num_experts, router_top_k(parts.model))


def _listener(tally: Tally) -> Chooser:
    """Hears every router and keeps its choice."""

    def hear(layer: int, said: RouterScores, _guess: torch.Tensor | None) -> torch.Tensor:
        tally.add(layer, said.scores.cpu().numpy(), said.own.cpu().numpy())
        return said.own

    return hear
