"""Foresight inside the captured step: a predictor on the device, evictions and prefetches that follow it.

    layer l       windows move on ─ ensure ─┬─ … experts … ─┬─ l + 1: ensure … experts … ─┬─ l + 2
                        │ scores            │               │                             │
    beside              └─► who is evicted  │               └─ Algorithm 1 ─► task ring   └─ Algorithm 1
    beside that                             └─ l triggers: its group is forecast anew ────┘

    nearer      where `follow` was told how: before layer 0 the token refines all of the step's forecasts, and
                at layer l the router of l + 1, asked early, those of its layer

    a prompt    the host's predictor reads it ─► at the hand-over to the device: its row of the predictor,
                the windows of its forecasts, its uses

The host's Belady and JSD, decision for decision (`hetero_gpu.foresight`), with the paces of the device. A
forecast is of layers that come again in the next step: it may take until the layer after its trigger asks,
but for that of the last layer. And what it says beyond the nearest steps, by which experts are kept and
evicted and none is fetched, follows beside later layers, those of the next step if need be.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from hetero_gpu.beside import Beside, used_here
from hetero_gpu.control import ControlRegion
from hetero_gpu.foresight import Candidates, JsdPrefetch, RefinedForecasts, Room
from hetero_gpu.tables import DeviceTables, Running, Windows
from hetero_runtime.orchestrator.captured_prefetch import Asker
from hetero_scheduler.eviction.belady_forecast import after_uses
from hetero_scheduler.predict import Forecast

NEAR = 2
"""Steps of a forecast that are made at once."""
_FURTHER_AT, _FURTHER_BY = 2, 6
"""Layers after a trigger's: that beside which the others are begun, and that by which they are taken over. A
step of a forecast takes 20 us, and a layer 50 us and more."""

if TYPE_CHECKING:
    from hetero_scheduler.predict.mamba2_compiled import CompiledState
    from hetero_scheduler.predict.refinement import Refinement


class DeviceForecasts(Protocol):
    """A predictor whose work is the device's alone; `hetero_gpu.predict.DevicePredictor` is one."""

    @property
    def probabilities(self) -> torch.Tensor:
        """float32 `[rows, horizon, layers, experts]`, always the same memory. Entry 0 is the next step."""

    @property
    def groups(self) -> Sequence[range]:
        """Layers that are forecast together, when the last of them has routed."""

    def observe(self, layer: int, router_logits: torch.Tensor) -> None:
        """`layer` has routed the first rows: `router_logits` `[n, experts]`. Capturable."""

    def defer(self, near: int) -> None:
        """From now on a forecast is of `near` steps, until it is taken further. Before any capture."""

    def look_further(self, group: int, num_rows: int) -> None:
        """Forecast what was deferred of the group of that number, beside all that reads probabilities."""

    def take_further(self, group: int, num_rows: int) -> None:
        """What that found becomes part of the probabilities."""

    def load(self, row: int, states: Sequence[CompiledState], *, forecasts: Sequence[Forecast] = ()) -> None:
        """Let `row` go on from a host predictor's `states`; its probabilities are those of `forecasts`."""


class ReadPrompt(NamedTuple):
    """What a host predictor remembers of a prompt, and what it expects after it."""

    states: Sequence[CompiledState]
    forecasts: Sequence[Forecast]
    uses: npt.NDArray[np.int64]
    """Of each expert in the prompt, `[layers, experts]`."""


class Nearer(NamedTuple):
    """What makes forecasts anew."""

    refinement: Refinement
    tokens: torch.Tensor
    """int64 `[rows]` on the device, always at the same place: what the step that runs reads."""
    early: Callable[[int, torch.Tensor], torch.Tensor | None] | None
    """The router after a layer, asked with that layer's input, as `EarlyRouters` does; None for nobody."""


class CapturedForesight(Asker):
    """See the module docstring. `active`: bool `[rows]` on the device, the rows that step. `per_layer`: tasks
    of a layer, the router's top-k and some extra."""

    asks_beside = True

    def __init__(
        self,
        forecasts: DeviceForecasts,
        *,
        active: torch.Tensor,
        tables: DeviceTables,
        region: ControlRegion,
        per_layer: int,
        room: Room,
    ) -> None:
        self._forecasts, self._active = forecasts, active
        self._windows = Windows(tables, forecasts.probabilities)
        self._candidates = Candidates(self._windows, per_layer=per_layer)
        self._jsd = JsdPrefetch(self._candidates, tables=tables, region=region, room=room)
        self._layers = range(tables.num_layers)
        self._group_of_trigger = {group.stop - 1: group for group in forecasts.groups}
        self._thinking, self._thought_of = Beside(tables.device), list[range]()
        self._further_of: dict[int, int] = {}
        """By the layer of the newest trigger, the number of its group, where a part of it is deferred."""
        if min(len(group) for group in forecasts.groups) > _FURTHER_BY:
            forecasts.defer(NEAR)
            self._further_of = {group.stop - 1: number for number, group in enumerate(forecasts.groups)}
        self._nearer: tuple[RefinedForecasts, Nearer] | None = None
        self._heard: torch.Tensor | None = None
        self._waiting: dict[int, ReadPrompt] = {}

    def follow(self, nearer: Nearer) -> None:
        """From now on make forecasts anew as `nearer` knows more; before anything is captured."""
        self._nearer = RefinedForecasts(self._windows, nearer.refinement), nearer
        self._jsd.looks_at_next = nearer.early is not None

    # ---- captured, for each layer

    def hear(self, router_logits: torch.Tensor) -> None:
        """The router of the layer that comes next said `router_logits` `[rows, experts]`."""
        self._heard = router_logits

    def begin_layer(self, layer: int, chosen: torch.Tensor) -> Running:
        active = self._active[: len(chosen)]
        if layer == 0 and self._nearer is not None:
            refined, nearer = self._nearer
            refined.with_tokens(nearer.tokens, active)
            self._candidates.renew(self._layers)
            self._jsd.ask(self._layers[-1])  # what the last layer of the step before asked is asked anew
        return Running(self._windows, active)

    def think(self, layer: int, num_rows: int) -> None:
        group = self._group_of_trigger.get(layer)
        if group is not None:
            self._thinking.join()  # the layer before may have triggered too
            with self._thinking.begin():
                self._observe(layer)
            self._thought_of.append(group)
        further = self._deferred(layer - _FURTHER_AT)
        if further is not None:
            self._thinking.join()
            with self._thinking.begin():
                self._forecasts.look_further(further, num_rows)

    def ask(self, layer: int, hidden: torch.Tensor) -> None:
        used_here(hidden)
        is_trigger = layer in self._group_of_trigger
        if not is_trigger:
            self._observe(layer)
        if not is_trigger or layer == self._layers[-1]:
            self._take_over(self._active[: len(hidden)])
        further = self._deferred(layer - _FURTHER_BY)
        if further is not None:
            self._thinking.join()
            self._forecasts.take_further(further, len(hidden))
            self._windows.rescore(self._forecasts.groups[further], self._active[: len(hidden)])
        self._look_early(layer, hidden)
        self._jsd.ask(layer)

    def _deferred(self, layer: int) -> int | None:
        """The number of the group that `layer`, of this step or below 0 of the one before, triggered; None
        where nothing of it was deferred."""
        return self._further_of.get(layer % len(self._layers))

    def _observe(self, layer: int) -> None:
        """The predictor takes in what was heard of `layer`."""
        assert self._heard is not None, f"layer {layer} runs, and its router was not heard"
        heard, self._heard = self._heard, None
        used_here(heard)
        self._forecasts.observe(layer, heard)

    def _take_over(self, active: torch.Tensor) -> None:
        """What was forecast since, by triggers, for the rows in `active`."""
        if self._thought_of:
            self._thinking.join()
        for group in self._thought_of:
            self._windows.renew(group, active)
            self._candidates.renew(group)
        self._thought_of.clear()

    def _look_early(self, layer: int, hidden: torch.Tensor) -> None:
        """The next layer's router may speak before its time."""
        if self._nearer is None or self._nearer[1].early is None:
            return
        refined, nearer = self._nearer
        assert nearer.early is not None, "asked just now"
        logits = nearer.early(layer, hidden)
        if logits is not None:
            refined.with_next_router(layer + 1, logits, self._active[: len(hidden)])
            self._candidates.renew(range(layer + 1, layer + 2))

    # ---- by the host, between passes

    def take(self, row: int, prompt: ReadPrompt) -> None:
        """A prompt was read for `row`; the device learns of it when it decodes."""
        self._waiting[row] = prompt

    def forget(self, row: int) -> None:
        """The text of `row` has ended."""
        self._waiting.pop(row, None)
        self._windows.forget(row)

    def begin_decode(self) -> None:
        """Rows whose prompts were read go on here. Tasks for layer 0, which runs next, come too late."""
        if not self._waiting:
            return
        is_new = torch.zeros_like(self._active)
        for row, prompt in self._waiting.items():
            self._forecasts.load(row, prompt.states, forecasts=prompt.forecasts)
            self._windows.remember(row, after_uses(np.zeros(prompt.uses.shape), prompt.uses))
            is_new[row] = True
        self._waiting.clear()
        self._windows.renew(self._layers, is_new)
        if len(self._layers) > 1:
            self._candidates.renew(self._layers[1:])
