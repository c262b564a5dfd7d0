"""Lookahead within the captured step: a forecast of the layers that come next, fetched and guarded.

    layer l     ensure ─ gather ─ experts ──────────────── layer l + 1: ensure ─ …
                  │                                          ▲
    beside        └─ hear l ─ foresee ─ the B most wanted ─ kept and window move on: who is evicted next
                                              └─► task ring

    a prompt    the host's predictor reads it (`foresight.rolling_prompts`) ─► its row of the device's

VisMMOE's prediction, order and eviction (§3.3, §3.4.2), as the host's RollingText, TopB and Lookahead say
them, with the paces of the device: forecasts are made and tasks sent at every STRIDE-th layer, since each
reaches W layers far; tasks as far as the ring has room, for experts that are used more often than not. Of all
this only the first layer's scores, which depend on its choice, keep the step waiting.
"""

from __future__ import annotations

import torch

from hetero_gpu.beside import used_here
from hetero_gpu.control import ControlRegion
from hetero_gpu.foresight import ExpiredFirst
from hetero_gpu.predict.lookahead import DeviceLookahead
from hetero_gpu.tables import DeviceTables, create_prefetch
from hetero_runtime.orchestrator.captured_prefetch import Asker
from hetero_runtime.orchestrator.plain_steps import PlainSteps, RecentSteps
from hetero_scheduler.eviction.lookahead import Lookahead
from hetero_scheduler.predict.lookahead_features import STRIDE
from hetero_scheduler.prefetch.top_b import DECAY, SIZE

LIKELY = 0.5
"""Probability from which an expert is worth a copy: what layers turn out to miss waits behind copies that are
for nothing."""


class CapturedLookahead(Asker):
    """See the module docstring. `per_layer`: tasks of a layer, the router's top-k and some extra.
    `kept_back`: slots that prefetches leave a layer. `eviction`: the host's, which scores go over to and come
    back from; None where eviction does not follow forecasts."""

    asks_beside = True

    def __init__(
        self,
        predictor: DeviceLookahead,
        *,
        tables: DeviceTables,
        region: ControlRegion,
        per_layer: int,
        kept_back: int,
        eviction: Lookahead | None,
    ) -> None:
        self.predictor = predictor
        self._tables, self._region, self._kept_back = tables, region, kept_back
        self._per_layer = min(per_layer, tables.num_experts)
        self._eviction = eviction
        self.plain = PlainSteps() if eviction is None else RecentSteps(eviction)
        self._scores = None if eviction is None else ExpiredFirst(tables)
        self._chosen: torch.Tensor | None = None
        window = torch.arange(predictor.shape.window, device=tables.device)
        self._decays = (DECAY**window)[:, None]

    # ---- captured, for each layer

    def begin_layer(self, layer: int, chosen: torch.Tensor) -> None:
        self._chosen = chosen
        if self._scores is not None and layer == 0:  # those of the others were made while the one before ran
            self._scores.begin_layer(layer, chosen)

    def ask(self, layer: int, hidden: torch.Tensor) -> None:
        assert self._chosen is not None, f"layer {layer} asks before it began"
        chosen, self._chosen = self._chosen, None
        used_here(chosen, hidden)
        self.predictor.hear(layer, chosen)
        if layer == self._tables.num_layers - 1:
            return
        if layer % STRIDE == 0:
            self._fetch(layer, self.predictor.foresee(layer, hidden))
        if self._scores is not None:
            self._scores.begin_layer(layer + 1, chosen)

    def _fetch(self, layer: int, said: torch.Tensor) -> None:
        """Send tasks for what was `said` of the layers after `layer`."""
        if self._scores is not None:
            self._scores.expect(range(layer + 1, layer + 1 + len(said)), said)
            self._scores.guard(layer)
        keys = self._wanted(layer, said)
        create_prefetch(self._tables, layer, keys, region=self._region, kept_back=self._kept_back)

    def _wanted(self, layer: int, said: torch.Tensor) -> torch.Tensor:
        """Keys of the B experts of most priority among the best of each layer, int32, the most wanted first;
        resident ones count among them. -1 for one that probably no row will use."""
        priority = said * self._decays[: len(said)]
        if self._per_layer < SIZE:  # else a layer's share of the B is never too large
            least = priority.topk(self._per_layer, dim=1).values[:, -1:]
            priority = priority * (priority >= least)
        best = priority.flatten().topk(min(SIZE, len(said) * self._per_layer)).indices
        is_likely = said.flatten()[best] >= LIKELY / self.predictor.shape.top_k
        keys = best + (self._tables.num_experts * (layer + 1) + 1)
        return (keys * is_likely - 1).int()

    # ---- by the host, between passes

    def begin_decode(self) -> None:
        if self._scores is not None and self._eviction is not None:
            self._scores.load(self._eviction.kept)

    def end_decode(self) -> None:
        if self._scores is not None:
            self._scores.export()
