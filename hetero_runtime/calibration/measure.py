"""Measure a calibration: text through the exact model, its routers listened to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from hetero_runtime.assembly import Parts
from hetero_runtime.errors import RequestError
from hetero_runtime.evaluation.base import TokenIds, TokensSeen
from hetero_runtime.hf.router_choice import RouterScores, let_choose
from hetero_runtime.hf.router_hooks import routed_layers, router_top_k
from hetero_runtime.no_room import no_room_for
from hetero_runtime.orchestrator import Phase
from hetero_scheduler.routing import Calibration, Shape, TokenPrior
from hetero_scheduler.routing.calibration import SHARE_UNIT

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
    tally = _Tally(_shape_of(parts), frequent_tokens(rows, num_priors))
    let_choose(parts.model, tally.hear, looks_ahead=False)
    num_tokens, num_done = sum(map(len, rows)), 0
    for row in rows:
        ids = torch.tensor(row, device=parts.device)
        tally.begin(ids)
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


def frequent_tokens(rows: Rows, count: int) -> npt.NDArray[np.int64]:
    """The `count` most frequent tokens, ties to the lowest, in ascending order."""
    tokens, uses = np.unique(np.concatenate([np.array(row) for row in rows]), return_counts=True)
    frequent: npt.NDArray[np.int64] = np.sort(tokens[np.argsort(-uses, kind="stable")[:count]])
    return frequent.astype(np.int64)


def _shape_of(parts: Parts) -> Shape:
    layers = routed_layers(parts.model)
    return Shape(len(layers), layers[0].num_experts, router_top_k(parts.model))


class _Tally:
    """Counts what routers say. The last row of `_chosen` is of all tokens without a prior."""

    def __init__(self, shape: Shape, tokens: npt.NDArray[np.int64]) -> None:
        num_layers, num_experts, _ = shape
        self._prior = TokenPrior(tokens, np.zeros((len(tokens) + 1, num_layers, num_experts), np.uint8))
        self._chosen = np.zeros((len(tokens) + 1, num_layers, num_experts), np.int32)
        self._occurrences = np.zeros(len(tokens) + 1, np.int64)
        self._range_sum = np.zeros(num_layers)
        self._rows = np.empty(0, np.int64)

    def begin(self, ids: torch.Tensor) -> None:
        """The next pass is over `ids`."""
        self._rows = self._prior.rows(ids.cpu().numpy())
        np.add.at(self._occurrences, self._rows, 1)

    def hear(self, layer: int, said: RouterScores, _guess: torch.Tensor | None) -> torch.Tensor:
        """A Chooser that keeps the router's choice."""
        most = said.scores.amax(dim=1)
        least = said.scores.masked_fill(said.scores == -torch.inf, torch.inf).amin(dim=1)
        self._range_sum[layer] += float((most - least).double().sum())
        np.add.at(self._chosen[:, layer], (self._rows[:, None], said.own.cpu().numpy()), 1)
        return said.own

    def calibration(self) -> Calibration:
        """Of everything so far."""
        occurrences = np.maximum(self._occurrences, 1)[:, None, None]
        share = np.minimum(self._chosen * SHARE_UNIT // occurrences, SHARE_UNIT - 1).astype(np.uint8)
        share[-1] = 0
        return Calibration(
            self._range_sum / self._occurrences.sum(),
            self._chosen.sum(axis=0).astype(np.float64),
            TokenPrior(self._prior.tokens, share),
        )

    def known_share(self) -> float:
        """Of tokens read, those with a prior."""
        return 1.0 - float(self._occurrences[-1]) / float(self._occurrences.sum())
