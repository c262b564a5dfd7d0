"""Block selection in the engine: the model's routers choose inside one set of experts for a whole draft.

    prompt      the routers' own choice, heard by the pool
    check       weights of the draft's positions ─► set of each layer ─► every position chooses inside it
    keep        where a text has to run again (recurrent states): with the experts that it was checked with

What is decided is in `hetero_scheduler.routing.block_selection`; slabs and copies do not enter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
import torch

from hetero_runtime.hf.rewind import GoesBack, TextsGoingBack
from hetero_runtime.hf.router_choice import RouterScores
from hetero_runtime.routing.routing import RoutingStats, on_host
from hetero_runtime.speculation.base import Draft
from hetero_runtime.speculation.checked import CheckedSequences, CheckedText
from hetero_scheduler.routing import BlockPool, BlockSelection, Shape
from hetero_scheduler.routing.commitment import CommitmentRates, confidence_weights

Experts = npt.NDArray[np.int64]
Decide = Callable[[int, npt.NDArray[np.float32], Experts], Experts]
"""`decide(layer, scores [T, E], own [T, top_k]) -> experts [T, top_k]`."""


class BlockRouting:
    """One pass at a time. `k`: the most tokens of a draft; `capacity`: of the pool of each layer."""

    def __init__(self, policy: BlockSelection, shape: Shape, *, capacity: int, k: int) -> None:
        self._policy, self._shape, self._capacity, self._k = policy, shape, capacity, k
        self._decide: Decide | None = None
        self._stats = RoutingStats()

    def new_text(self, state: GoesBack) -> BlockText:
        """A text that has not begun. Any thread."""
        pool = BlockPool(self._policy, self._shape, capacity=self._capacity)
        return BlockText(state, self, pool, CommitmentRates(self._k))

    def choose(self, layer: int, said: RouterScores, guess: torch.Tensor | None) -> torch.Tensor:
        """A `hf.router_choice.Chooser`, of a pass inside `deciding`."""
        assert self._decide is not None, "the router was asked in a pass that names no text"
        scores, own, _ = on_host(said, guess)
        experts = self._decide(layer, scores[:, 0], own[:, 0])
        return torch.from_numpy(np.ascontiguousarray(experts)).to(said.own.device)

    @contextmanager
    def deciding(self, decide: Decide) -> Iterator[None]:
        """Around a pass, whose routers choose what `decide` says. The caller has the turn."""
        self._decide = decide
        try:
            yield
        finally:
            self._decide = None

    def count(self, *, demanded: int, deviating: int) -> None:
        """Add what one layer of a block came to."""
        self._stats += RoutingStats(demanded=demanded, deviating=deviating)

    def stats(self) -> RoutingStats:
        """Of blocks, since the engine was loaded."""
        return self._stats

    def device_stats(self) -> RoutingStats:
        """Nothing: the host decides every block."""
        return RoutingStats()


class BlockText(CheckedText):
    """A text whose drafts share their experts."""

    def __init__(
        self, state: GoesBack, routing: BlockRouting, pool: BlockPool, rates: CommitmentRates
    ) -> None:
        super().__init__(state)
        self._routing, self._pool, self._rates = routing, pool, rates
        self._weights = np.ones(1)
        self._executed: dict[int, Experts] = {}

    def extend(self, ids: torch.Tensor, images: dict[str, torch.Tensor] | None = None) -> torch.Tensor:
        with self._routing.deciding(self._read):
            return super().extend(ids, images)

    def check(self, last: int, draft: Draft, device: torch.device) -> torch.Tensor:
        if draft.confidences is None:
            self._weights = self._rates.weights(len(draft.token_ids))
        else:
            self._weights = confidence_weights(draft.confidences)
        with self._routing.deciding(self._select):
            return super().check(last, draft, device)

    def keep(self, count: int) -> None:
        self._rates.observe(len(self._weights) - 1, count - 1)
        with self._routing.deciding(lambda layer, scores, own: self._executed[layer][: len(own)]):
            super().keep(count)

    def _read(self, layer: int, scores: npt.NDArray[np.float32], own: Experts) -> Experts:
        self._pool.read(layer, own)
        return own

    def _select(self, layer: int, scores: npt.NDArray[np.float32], own: Experts) -> Experts:
        decided = self._pool.select(layer, scores, own, self._weights)
        self._routing.count(demanded=decided.demanded, deviating=decided.deviating)
        self._executed[layer] = decided.experts
        return decided.experts


class BlockSequences(CheckedSequences):
    """Texts whose drafts share their experts."""

    def __init__(self, sequences: TextsGoingBack, routing: BlockRouting) -> None:
        super().__init__(sequences)
        self._routing = routing

    @contextmanager
    def open(self) -> Iterator[BlockText]:
        with self._sequences.open() as state:
            yield self._routing.new_text(state)
