"""One engine's foresight; see the package."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import numpy as np
import numpy.typing as npt
import torch

from hetero_gpu import SlabCache
from hetero_runtime.foresight.pace import Pace
from hetero_runtime.foresight.prefetcher import Prefetcher
from hetero_runtime.foresight.rival import Rival
from hetero_runtime.foresight.rows import Rows, at_pass
from hetero_runtime.foresight.sight import Sight
from hetero_runtime.foresight.text import Said, Text
from hetero_runtime.hf.visual import Images
from hetero_runtime.orchestrator.ahead import Ahead, PredictionStats
from hetero_scheduler import ExpertKey
from hetero_scheduler.eviction.belady_rows import BeladyRows
from hetero_scheduler.prefetch.steering import Steering


class Foresight(Ahead):
    """The loop of a pass, one pass at a time:

        pass_of             whose text it is, and which token, where it is one
        looking             at its images, where it has any
        hear                a MoE layer's router spoke
        layer_begins        its experts are known
        look_ahead          its loads are submitted: forecast, prefetch while it runs
        expert_ran          one of them has run: prefetch again, in prompts whose layers are foreseen
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
        self._num_layers, self._num_experts = steering.eviction.score.shape
        self._pass = -1
        self._row: Text | None = None
        self._num_active, self._is_prompt = 1, False
        self._layer: int | None = None
        """Whose router was heard last in this pass."""
        self._sight: Sight | None = None
        self._stats = PredictionStats()

    @property
    def is_prefetching(self) -> bool:
        """Whether forecasts lead to prefetches here."""
        return self._steering.schedule is not None

    @property
    def orders_prompts(self) -> bool:
        """Whether forecasts say of a prompt, layer by layer, what comes next in it."""
        return self._rows.row(0).orders_prompts

    @property
    def sees(self) -> bool:
        """Whether forecasts depend on what images look like."""
        return self._rows.row(0).sees

    def look_through(self, sight: Sight) -> None:
        """From now on texts are told by `sight` what their images look like."""
        self._sight = sight

    def stats(self) -> PredictionStats:
        return self._stats

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
        self._layer = None
        self.rival.begin_pass()
        self._pace.pass_begins()
        if token is not None and (said := self._row.begin_step(token)):
            self._steer(Said(forecast, runs_now=True) for forecast in said)
            self._prefetcher.fill(self._pass * self._num_layers - 1, [])
        try:
            yield
        finally:
            self._row = None

    def looking(self, ids: torch.Tensor, images: Images | None) -> AbstractContextManager[None]:
        """Around a pass over `ids`, at `images` where it has any and somebody looks."""
        return self._sight.during(ids, images) if images and self._sight is not None else nullcontext()

    # ---- one layer

    def layer_begins(self, chosen: npt.NDArray[np.int64]) -> None:
        self._pace.layer_begins(self._cache.stall_s())
        self._is_prompt = len(chosen) > 1
        if self._row is None:
            return
        self.rival.hear(chosen)
        if self._layer is not None:
            began = time.perf_counter()
            self._row.decided(self._layer, chosen)
            self._stats += PredictionStats(0, time.perf_counter() - began)

    def hear(self, layer: int, logits: torch.Tensor, hidden: torch.Tensor) -> None:
        """As in `listen_to_routers`: the router of `layer` said `logits` when asked `hidden`."""
        if self._row is None:
            return
        self._layer = layer
        visual = None if self._sight is None else self._sight.news()
        if visual is not None:
            self._row.see(visual)
        self._row.hear(layer, logits, hidden)

    def look_ahead(self, layer: int, running: list[ExpertKey]) -> None:
        if self._row is None:
            return
        if self._layer is not None:
            began = time.perf_counter()
            said = self._row.speak(layer)
            self._stats += PredictionStats(1, time.perf_counter() - began)
            self._layer = None
            self._steer(said)
        self.layer_ends(layer, running)

    def expert_ran(self) -> None:
        """A prompt's layer is long: the link asks again and again what comes next."""
        if self._row is not None and self._is_prompt and self.orders_prompts:
            self._prefetcher.refill()

    def layer_ends(self, layer: int, running: list[ExpertKey]) -> None:
        """A prompt needs the link for its own layers, unless it is known what they will ask for."""
        if self._row is None:
            return
        pos = self._pass * self._num_layers + layer
        if not self._is_prompt or layer == self._num_layers - 1:
            self._prefetcher.fill(pos, running)
        elif self.orders_prompts:
            kept_back = min(self._num_experts, self._cache.pool_size(layer) // 2)
            self._prefetcher.fill(pos, running, kept_back=kept_back)

    def _steer(self, said: Iterable[Said]) -> None:
        """Act upon forecasts, each dated by the pass of its next run."""
        for forecast, runs_now in said:
            number = self._pass + (0 if runs_now else self._num_active)
            self._steering.take(at_pass(forecast, number, num_layers=self._num_layers))
