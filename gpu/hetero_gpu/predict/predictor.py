"""The Mamba2 predictor on the device: what the host's says, for several rows, without the host."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hetero_gpu.control.fault import TableError
from hetero_gpu.control.region import ControlRegion, Word
from hetero_gpu.predict.forecast import GroupForecast
from hetero_gpu.predict.memory import DeviceWeights, RowMemory
from hetero_gpu.predict.sizes import ForecastSizes
from hetero_gpu.router import MOST_EXPERTS
from hetero_scheduler.predict.base import Forecast
from hetero_scheduler.predict.mamba2 import HORIZON, Mamba2Predictor
from hetero_scheduler.predict.mamba2_compiled import CompiledState
from hetero_scheduler.predict.mamba2_model import GroupModel

_INTERPRETED_PROGRAMS = 3
"""One after the other: enough to share work out."""


class DevicePredictor:
    """A forecast for the rows of a decode step, captured with it.

    `models` as for `Mamba2Predictor`, whose results these are up to rounding. `active`: bool `[rows]` on the
    device, read anew by each forecast; a row that is not active keeps what it remembers, and its
    probabilities are 0. Addresses never change. Float32 throughout; matrices may be kept in `weight_dtype`
    (their bytes count little beside the device's cache: bf16 is for models far wider than the trained ones).

    One for each step: `observe` every layer, in order. What lies further ahead may be left for later.
    """

    probabilities: torch.Tensor
    """float32 `[rows, horizon, layers, experts]`: entry h of group g's layers is of the step h + 1 after that
    in which the group's forecast was made; shares of one row, step and layer sum to one."""
    router_logits: torch.Tensor
    """`[layers, rows, experts]`: what routers said last. They may write here themselves."""

    def __init__(
        self,
        models: Sequence[GroupModel],
        active: torch.Tensor,
        *,
        horizon: int = HORIZON,
        weight_dtype: torch.dtype = torch.float32,
        logits_dtype: torch.dtype = torch.float32,
        num_programs: int | None = None,
    ) -> None:
        """`num_programs`: of a launch; None takes what is useful and fits on the device.

        Raises ValueError as `Mamba2Predictor` does, and for more experts than can be told apart.
        """
        host = Mamba2Predictor(models, horizon)
        if host.num_experts > MOST_EXPERTS:
            raise ValueError(f"{host.num_experts} experts a layer, which may be {MOST_EXPERTS} at most")
        self.horizon, self.groups, self.device = horizon, host.groups, active.device
        self._near = horizon
        self._active, self._num_programs = active, num_programs
        rows, layers, experts = len(active), host.num_layers, host.num_experts
        self.probabilities = torch.zeros((rows, horizon, layers, experts), device=self.device)
        self.router_logits = torch.zeros((layers, rows, experts), dtype=logits_dtype, device=self.device)
        self._error = torch.zeros(1, dtype=torch.int64, device=self.device)
        self._error_address = self._error.data_ptr()
        self._region: ControlRegion | None = None
        self._forecasts = [self._group_forecast(g, model, weight_dtype) for g, model in enumerate(models)]
        self._owed = torch.zeros((len(models), rows), dtype=torch.bool, device=self.device)
        self._further: torch.Tensor | None = None
        self._group_of_trigger = {group.stop - 1: g for g, group in enumerate(self.groups)}

    def _group_forecast(self, g: int, model: GroupModel, weight_dtype: torch.dtype) -> GroupForecast:
        rows, layers = len(self._active), slice(self.groups[g].start, self.groups[g].stop)
        sizes = ForecastSizes.of(model.shape, horizon=self.horizon)
        return GroupForecast.of(
            sizes,
            DeviceWeights.of(model, dtype=weight_dtype, device=self.device),
            memory=RowMemory.empty(sizes, rows=rows, device=self.device),
            router_logits=self.router_logits[layers],
            active=self._active,
            probabilities=self.probabilities[:, :, layers],
        )

    def attach(self, region: ControlRegion) -> None:
        """Report errors in `region`; before anything is captured."""
        self._region, self._error_address = region, region.address(Word.ERROR)

    def defer(self, near: int) -> None:
        """From now on forecasts are of the `near` next steps at once; what follows is for `look_further` to
        say, and until `take_further` what the forecast before said of it stands. Before anything is captured.
        """
        assert 1 <= near < self.horizon, f"{near} of {self.horizon} steps leave nothing for later"
        self._near, self._further = near, torch.zeros_like(self.probabilities)

    # ---- the step; asynchronous and capturable

    def observe(self, layer: int, router_logits: torch.Tensor) -> None:
        """`layer` has routed: `router_logits` `[n, experts]` of the first n rows, any float type.

        No copy where they are `self.router_logits[layer, :n]` already. At a group's last layer its forecast
        is made, for those rows: the other rows' probabilities stay what they were.
        """
        rows = len(router_logits)
        own = self.router_logits[layer, :rows]
        if own.data_ptr() != router_logits.data_ptr():
            own.copy_(router_logits)
        g = self._group_of_trigger.get(layer)
        if g is not None:
            self._owed[g, :rows].copy_(self._active[:rows])
            self._launch(g, self._forecasts[g], range(self._near), rows)

    def look_further(self, g: int, rows: int) -> None:
        """After group `g`'s forecast and before its next: forecast the steps beyond the near ones, for those
        of the first `rows` rows that still go on from there. Nothing that others read is written."""
        assert self._further is not None, "nothing was deferred"
        layers = slice(self.groups[g].start, self.groups[g].stop)
        forecast = self._forecasts[g]._replace(
            active=self._owed[g], probabilities=self._further[:, :, layers]
        )
        self._launch(g, forecast, range(self._near, self.horizon), rows)

    def take_further(self, g: int, rows: int) -> None:
        """What `look_further` found becomes part of those rows' probabilities."""
        assert self._further is not None, "nothing was deferred"
        layers = slice(self.groups[g].start, self.groups[g].stop)
        place, owed = (slice(rows), slice(self._near, None), layers), self._owed[g, :rows]
        now = self.probabilities[place]
        now.copy_(torch.where(owed[:, None, None, None], self._further[place], now))
        owed.zero_()

    def _launch(self, g: int, forecast: GroupForecast, steps: range, rows: int) -> None:
        forecast.launch(
            steps, rows=rows, num_programs=self._programs(g, rows), error_address=self._error_address
        )

    def _programs(self, g: int, rows: int) -> int:
        """The same for the same rows, whenever it is asked."""
        if self._num_programs is not None:
            return self._num_programs
        if not self._active.is_cuda:
            return _INTERPRETED_PROGRAMS
        sizes = self._forecasts[g].sizes
        room = torch.cuda.get_device_properties(self.device).multi_processor_count
        return int(min(room, rows * max(sizes.heads, sizes.layers)))

    # ---- hand-over; each of these waits for the device

    def load(self, row: int, states: Sequence[CompiledState], *, forecasts: Sequence[Forecast] = ()) -> None:
        """Let `row` go on from `states`, one a group, as a host predictor has them after a prompt.

        `forecasts`: what that predictor expects of the next steps, which becomes the row's probabilities;
        without them these are 0.
        """
        self._owed[:, row] = False
        self.probabilities[row].zero_()
        for forecast in forecasts:
            layers = slice(forecast.layers[0], forecast.layers[-1] + 1)
            shares = torch.from_numpy(forecast.probabilities[: self.horizon])
            self.probabilities[row, : len(shares), layers] = shares.to(self.device)
        for group, state in zip(self._forecasts, states, strict=True):
            group.memory.load(row, state)

    def export(self, row: int) -> tuple[CompiledState, ...]:
        """What `row` remembers, one a group."""
        return tuple(group.memory.export(row, window=group.sizes.window) for group in self._forecasts)

    def raise_if_failed(self) -> None:
        """Raise RuntimeError for what a kernel reported, once. With a region attached its word is read."""
        if self._region is not None:
            self._region.raise_if_failed()
            return
        code = TableError(int(self._error.item()))
        if code is not TableError.NONE:
            self._error.zero_()
            raise RuntimeError(code.explain())
