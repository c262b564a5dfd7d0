"""The texts of a captured engine: the host's predictors read prompts, the device goes on from there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import torch

from hetero_runtime.foresight.rows import Row, as_half
from hetero_runtime.hf.visual import Images
from hetero_runtime.orchestrator.captured_foresight import CapturedForesight, ReadPrompt
from hetero_runtime.plan.demand import PREDICTOR_TOKENS
from hetero_scheduler.predict.routing import RouterShape, chosen_experts

if TYPE_CHECKING:
    from hetero_scheduler.predict.mamba2 import Mamba2Predictor


class Prompts:
    """One predictor for each row. `device`: what foresees while rows step."""

    def __init__(
        self,
        predictors: Sequence[Mamba2Predictor],
        shape: RouterShape,
        *,
        device: CapturedForesight,
    ) -> None:
        self._predictors, self._device, self._shape = predictors, device, shape
        self._rows = [Row(predictor, shape) for predictor in predictors]
        self._heard: list[torch.Tensor] | None = None

    @contextmanager
    def read(
        self, row: int, ids: torch.Tensor, *, is_first: bool, images: Images | None = None
    ) -> Iterator[None]:
        """Around a pass over a prompt, or a part of one, in `row`. `is_first`: its text begins with it. Waits
        for the device at its end. Of a pass that is given up nothing stays."""
        self._heard = []
        try:
            yield
            heard = self._heard
        finally:
            self._heard = None
        self._rows[row].begin_pass()
        if is_first:
            self._rows[row].begin()
        forecasts, uses = [], []
        for layer, logits in enumerate(map(as_half, heard)):
            forecasts += self._rows[row].observe(layer, logits)
            chosen = chosen_experts(logits, self._shape.top_k)
            uses.append(np.bincount(chosen.ravel(), minlength=self._shape.num_experts))
        states = self._predictors[row].states()
        self._device.take(row, ReadPrompt(states, forecasts, np.stack(uses)))

    def hear(self, layer: int, router_logits: torch.Tensor, _hidden: torch.Tensor) -> None:
        """As in `listen_to_routers`, of a prompt that is read or of rows that step."""
        if self._heard is None:
            self._device.hear(router_logits)
            return
        assert layer == len(self._heard), f"layer {layer} routed after {len(self._heard)} others"
        self._heard.append(router_logits[-PREDICTOR_TOKENS:].detach().to(torch.float16, copy=True))

    def end(self, row: int) -> None:
        """The text of `row` has ended."""
        self._device.forget(row)
