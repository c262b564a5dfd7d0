"""One engine's foresight; see the package."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
import torch

from hetero_gpu import SlabCache
from hetero_runtime.foresight.pace import Pace
from hetero_runtime.foresight.prefetcher import Prefetcher
from hetero_runtime.foresight.rival import Rival
from hetero_runtime.foresight.rows import Logits, Row, Rows, as_half, at_pass
from hetero_runtime.hf.early_routers import EarlyRouters
from hetero_runtime.orchestrator.ahead import Ahead
from hetero_scheduler import ExpertKey
from hetero_scheduler.eviction.belady_rows import BeladyRows
from hetero_scheduler.predict import Forecast
from hetero_scheduler.prefetch.steering import Steering


class Foresight(Ahead):
    """The loop of a pass, one pass at a time:

        pass_of             whose text it is, and which token, where it is one
        layer_begins        of each MoE layer
        hear                its router spoke, whenever that is; the next one may be asked early
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
        early_routers: EarlyRouters | None = None,
    ) -> None:
        """`early_routers`: for predictors that ask for the next layer's router."""
        self._cache, self._rows, self._steering = cache, rows, steering
        self._prefetcher, self._pace, self.rival = prefetcher, pace, rival
        self._num_layers = steering.eviction.score.shape[0]
        self._pass = -1
        self._row: Row | None = None
        self._num_active, self._is_prompt = 1, False
        self._early_routers = early_routers
        self._heard: Logits | None = None
        self._heard_early: Logits | None = None

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
    def pass_of(self, place: int, token: int | None) -> Iterator[None]:
        """Around a pass of the text at `place`; the caller has the turn. `token`: the id that runs, None for
        several."""
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
        if token is not None and (said := self._row.begin_step(token)):
            self._steer(said, self._pass)
            self._prefetcher.fill(self._pass * self._num_layers - 1, [])
        try:
            yield
        finally:
            self._row = self._heard = self._heard_early = None

    # ---- one layer

    def layer_begins(self, chosen: npt.NDArray[np.int64]) -> None:
        self._pace.layer_begins(self._cache.stall_s())
        self._is_prompt = len(chosen) > 1
        if self._row is not None:
            self.rival.hear(chosen)

    def hear(self, layer: int, logits: torch.Tensor, hidden: torch.Tensor) -> None:
        """As in `listen_to_routers`: the router of `layer` said `logits` when asked `hidden`."""
        if self._row is None:
            return
        self._heard = as_half(logits)
        if self._early_routers is not None and len(logits) == 1:
            early = self._early_routers(layer, hidden)
            self._heard_early = None if early is None else as_half(early)

    def look_ahead(self, layer: int, running: list[ExpertKey]) -> None:
        if self._row is None or self._heard is None:
            return
        heard, early, self._heard, self._heard_early = self._heard, self._heard_early, None, None
        self._steer(self._row.observe(layer, heard), self._pass + self._num_active)
        if early is not None:
            self._steer(self._row.observe_next(layer + 1, early), self._pass)
        self.layer_ends(layer, running)

    def layer_ends(self, layer: int, running: list[ExpertKey]) -> None:
        """A prompt needs the link for its own layers."""
        is_last = layer == self._num_layers - 1
        if self._row is not None and (is_last or not self._is_prompt):
            self._prefetcher.fill(self._pass * self._num_layers + layer, running)

    def _steer(self, forecasts: Iterable[Forecast], number: int) -> None:
        """Act upon `forecasts`, whose next run is in that pass."""
        for forecast in forecasts:
            self._steering.take(at_pass(forecast, number, num_layers=self._num_layers))
