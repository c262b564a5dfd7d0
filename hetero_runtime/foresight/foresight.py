"""One engine's foresight; see the package."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
import torch

from hetero_gpu import SlabCache
from hetero_runtime.foresight.pace import Pace
from hetero_runtime.foresight.prefetcher import Prefetcher
from hetero_runtime.foresight.rival import Rival
from hetero_runtime.foresight.rows import HALF_MAX, Logits, Row, Rows, at_next_pass
from hetero_runtime.orchestrator.ahead import Ahead
from hetero_scheduler import ExpertKey
from hetero_scheduler.eviction.belady_rows import BeladyRows
from hetero_scheduler.prefetch.steering import Steering


class Foresight(Ahead):
    """The loop of a pass, one pass at a time:

        pass_of(place)      whose text it is
        layer_begins        of each MoE layer
        hear                its router spoke, whenever that is
        look_ahead          its loads are submitted: forecast, prefetch while it runs
        layer_ends          prefetch again

    Positions count passes of the engine, whoever they belong to. With n texts under way a text's next step
    is expected n passes from now, since they take turns.
    """

    def __init__(
        self,
        cache: SlabCache,
        rows: Rows,
        *,
        steering: Steering,
        prefetcher: Prefetcher,
        pace: Pace,
        rival: Rival,
    ) -> None:
        self._cache, self._rows, self._steering = cache, rows, steering
        self._prefetcher, self._pace, self.rival = prefetcher, pace, rival
        self._num_layers = steering.eviction.score.shape[0]
        self._pass = -1
        self._row: Row | None = None
        self._num_active, self._is_prompt = 1, False
        self._heard: Logits | None = None

    @property
    def is_prefetching(self) -> bool:
        """Whether forecasts lead to prefetches here."""
        return self._steering.schedule is not None

    # ---- texts

    @contextmanager
    def text(self) -> Iterator[int]:
        """A place for a new text, until the context is left. Any thread."""
        place = self._rows.take()
        try:
            yield place
        finally:
            self._rows.give_back(place)

    @contextmanager
    def pass_of(self, place: int) -> Iterator[None]:
        """Around a pass of the text at `place`; the caller has the turn."""
        active, self._row = self._rows.active(), self._rows.row(place)
        self._num_active, self._pass = len(active), self._pass + 1
        if self._row.is_new:
            self._row.begin()
            if self._num_active == 1:
                self._steering.clear()
        if isinstance(self._steering.eviction, BeladyRows):
            self._steering.eviction.turn_to(place, active=active)
        self._row.begin_pass()
        self.rival.begin_pass()
        self._pace.pass_begins()
        try:
            yield
        finally:
            self._row = self._heard = None

    # ---- one layer

    def layer_begins(self, chosen: npt.NDArray[np.int64]) -> None:
        self._pace.layer_begins(self._cache.stall_s())
        self._is_prompt = len(chosen) > 1
        if self._row is not None:
            self.rival.hear(chosen)

    def hear(self, layer: int, logits: torch.Tensor) -> None:
        """The router of `layer` said `logits` `[tokens, num_experts]`, before any normalisation."""
        if self._row is not None:
            half = logits.detach().to(torch.float16).cpu().numpy()
            self._heard = np.clip(half, -HALF_MAX, HALF_MAX)  # a copy: `half` may be the model's own

    def look_ahead(self, layer: int, running: list[ExpertKey]) -> None:
        if self._row is None or self._heard is None:
            return
        heard, self._heard = self._heard, None
        next_pass = self._pass + self._num_active
        for forecast in self._row.observe(layer, heard):
            self._steering.take(at_next_pass(forecast, next_pass=next_pass, num_layers=self._num_layers))
        self.layer_ends(layer, running)

    def layer_ends(self, layer: int, running: list[ExpertKey]) -> None:
        """A prompt needs the link for its own layers."""
        is_last = layer == self._num_layers - 1
        if self._row is not None and (is_last or not self._is_prompt):
            self._prefetcher.fill(self._pass * self._num_layers + layer, running)
